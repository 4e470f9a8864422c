"""Optimizers, one per file: model -> torch optimizer with its weight-decay groups."""
