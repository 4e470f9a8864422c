"""From a checked config to running processes."""
