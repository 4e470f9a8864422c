"""Checkpoints: saving, scheduling, retention and resuming."""
