"""The learning rate that follows the batch size from a reference point. Pure arithmetic, no imports that cost."""

from typing import TypeGuard

# rule -> power of (batch size / reference batch size)
POWERS = {
    # SGD: k small steps move the weights about as far as one step of k times the rate along their mean gradient
    # (Goyal et al. 2017, arXiv 1706.02677)
    "linear": 1.0,
    # keeps the variance that the noise of the gradient adds to a step (Krizhevsky 2014, arXiv 1404.5997); for Adam,
    # which divides by the gradient's size, it follows from its stochastic differential equation (Malladi et al.
    # 2022, arXiv 2205.10287, where betas and epsilon change too)
    "sqrt": 0.5,
}


def scaled_lr(
    rule: str, base_lr: object, base_batch_size: object, global_batch_size: object
) -> float | None:
    """The learning rate of a batch size.

    Args:
        rule: `linear` or `sqrt`.
        base_lr: A learning rate that is known to be good.
        base_batch_size: Samples per optimizer step that it is good for.
        global_batch_size: Samples per optimizer step.

    Returns:
        None where one of them is no number above 0, or there is no such rule: the check of the config says so.
    """
    if not (
        rule in POWERS
        and is_positive(base_lr)
        and is_positive(base_batch_size)
        and is_positive(global_batch_size)
    ):
        return None
    return float(base_lr * (global_batch_size / base_batch_size) ** POWERS[rule])


def is_positive(value: object) -> TypeGuard[int | float]:
    """Whether a value of a config is a finite number above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < float("inf")  # type: ignore[operator]
