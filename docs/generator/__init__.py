"""Generate documentation pages and tables from conf/, the source code and benchmarks/results/."""
