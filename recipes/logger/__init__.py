"""The loggers of a run: one row per logged optimizer step, one line per event."""
