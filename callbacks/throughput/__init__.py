"""Measure tokens per second and MFU, and leave out what is not training."""
