"""Measure tokens per second and MFU, excluding time not spent on training."""
