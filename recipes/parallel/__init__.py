"""Tensor, context, expert and pipeline parallelism."""
