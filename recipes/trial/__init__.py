"""Trials: a few real steps of a run, on its ranks and under its strategy, that answer a question and leave no run."""
