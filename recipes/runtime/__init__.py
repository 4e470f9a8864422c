"""One process: world size and rank, signals, run-folder lock, console, failures, exit codes. Independent of recipes."""
