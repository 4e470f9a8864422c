"""Checkpoints: what is written, when, what stays on the disk, and where a run resumes from."""
