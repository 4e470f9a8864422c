"""Arithmetic shared by all strategies: gradient accumulation, collectives, losses and EMA."""
