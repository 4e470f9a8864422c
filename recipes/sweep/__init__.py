"""Many runs from one command: the search space, the job pool, and the results."""
