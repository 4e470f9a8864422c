"""Start the processes of a run from a checked config."""
