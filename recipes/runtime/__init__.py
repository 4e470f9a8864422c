"""One process: its world, signals, lock, console, failure and exit code. Knows no recipe."""
