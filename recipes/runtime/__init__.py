"""Process-level services: ranks, signals, run folder lock, console, failures, exit codes."""
