"""Trials: a few real steps on a run's ranks and under its strategy, without creating a run."""
