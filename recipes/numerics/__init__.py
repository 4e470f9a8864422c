"""Arithmetic that every strategy shares: accumulation, collectives, gradients, loss, weight average."""
