"""Parameter groups: weight decay acts on matrices, never on biases and norms."""

from typing import Any

from torch import nn

from recipes.adapter import is_factor
from recipes.model.init import unsharded_shape


def decay_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Split trainable parameters into groups with and without weight decay.

    Matrices, embeddings and convolution kernels (two or more dimensions) are decayed; biases, norm gains and other
    vectors are not, because shrinking them toward zero does not reduce complexity. A tied parameter is listed once.

    Args:
        model: Model, may be sharded: dimensions are counted on unsharded parameters.
        weight_decay: Weight decay of the matrices.

    Returns:
        One or two groups with `params`, `weight_decay` and `group_name` (`decay`, `no_decay`).
    """
    trainable = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    # decaying the scaling factors of an adapter toward zero would switch off the activations they multiply
    matrices = [p for p, name in trainable.items() if len(unsharded_shape(p)) >= 2 and not is_factor(name)]
    vectors = [p for p, name in trainable.items() if len(unsharded_shape(p)) < 2 or is_factor(name)]
    groups = [
        {"params": matrices, "weight_decay": weight_decay, "group_name": "decay"},
        {"params": vectors, "weight_decay": 0.0, "group_name": "no_decay"},
    ]
    return [group for group in groups if group["params"]]
