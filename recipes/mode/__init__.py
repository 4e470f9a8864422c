"""What `mode=` does with a composed run: one file per mode, each a function that returns an exit code."""
