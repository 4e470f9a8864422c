"""Loggers: one row per logged optimizer step, one line per event."""
