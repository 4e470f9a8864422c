"""Detect loss spikes, skip the step, roll back, back off the learning rate, stop."""
