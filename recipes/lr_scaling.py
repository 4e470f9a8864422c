"""Scale a base learning rate with the batch size; no slow imports."""

from typing import TypeGuard

# rule -> power of (batch size / base batch size)
POWERS = {
    # SGD: one step along the mean gradient at k times the rate moves the weights about as far as k small steps
    # (Goyal et al. 2017, arXiv 1706.02677)
    "linear": 1.0,
    # keeps the variance of an update due to gradient noise constant (Krizhevsky 2014, arXiv 1404.5997); for Adam, it
    # follows from the stochastic differential equation that approximates it (Malladi et al. 2022, arXiv 2205.10287,
    # where betas and epsilon change too)
    "sqrt": 0.5,
}


def scaled_lr(rule: str, base_lr: object, base_batch_size: object, global_batch_size: object) -> float | None:
    """Return the learning rate for a global batch size.

    Args:
        rule: `linear` or `sqrt`.
        base_lr: Learning rate tuned at `base_batch_size`.
        base_batch_size: Samples per optimizer step that `base_lr` was tuned for.
        global_batch_size: Samples per optimizer step.

    Returns:
        The learning rate; None if a value is not a positive finite number or the rule is unknown, both of which the
        config check reports.
    """
    if not (
        rule in POWERS and is_positive(base_lr) and is_positive(base_batch_size) and is_positive(global_batch_size)
    ):
        return None
    return float(base_lr * (global_batch_size / base_batch_size) ** POWERS[rule])


def is_positive(value: object) -> TypeGuard[int | float]:
    """Return whether a config value is a positive finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
