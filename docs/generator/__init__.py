"""Pages and tables of the documentation that are made from conf/, the source and benchmarks/results/."""
