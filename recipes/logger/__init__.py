"""Where a run's numbers go: one row per logged optimizer step, one line per event."""
