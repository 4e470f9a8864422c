"""Log peak memory, and dump what fills it when it runs out."""
