"""Log peak memory, and write a memory dump on an out-of-memory error."""
