"""Arithmetic that every strategy shares: gradient accumulation, collectives, losses, averaged weights."""
