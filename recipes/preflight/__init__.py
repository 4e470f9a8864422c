"""Sanity checks before a long run, executed on the recipe itself."""
