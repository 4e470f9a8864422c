"""What each `precision=` option means: the dtypes of weights, products and gradient reduction, for every engine.

This half needs torch alone: the dtypes, FSDP2's policy, DeepSpeed's config block. The Lightning plugins are built in
`recipes.strategy.precision_plugin`, because this module must not import Lightning.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True, kw_only=True)
class Precision:
    """One `precision=` option.

    Attributes:
        name: Lightning's name of it.
    """

    name: Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true"]

    @property
    def param_dtype(self) -> torch.dtype:
        """Dtype of weights and optimizer state."""
        return _DTYPES[self.name][0]

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of matmuls."""
        return _DTYPES[self.name][1]

    @property
    def reduce_dtype(self) -> torch.dtype:
        """Dtype in which gradients are summed over ranks."""
        return _DTYPES[self.name][2]

    @property
    def is_mixed(self) -> bool:
        """Whether autocast computes products in a lower precision than the weights have."""
        return self.compute_dtype != self.param_dtype

    @property
    def scales_loss(self) -> bool:
        """Whether gradients carry a loss scale until the optimizer step; only float16 needs one."""
        return self.compute_dtype == torch.float16


# weights, products, gradient reduction
_DTYPES: dict[str, tuple[torch.dtype, torch.dtype, torch.dtype]] = {
    "32-true": (torch.float32, torch.float32, torch.float32),
    "bf16-mixed": (torch.float32, torch.bfloat16, torch.float32),
    "16-mixed": (torch.float32, torch.float16, torch.float32),
    "bf16-true": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
}


def to_fsdp_policy(precision: Precision, *, gather_low_precision: bool) -> MixedPrecisionPolicy:
    """Return FSDP2's policy for one group of parameters.

    Args:
        precision: The run's.
        gather_low_precision: Whether to all-gather the weights in the compute dtype. Right only for weights that
            autocast casts anyway (matrices): a norm or an embedding would be rounded, which one device does not do.
    """
    return MixedPrecisionPolicy(
        param_dtype=precision.compute_dtype if gather_low_precision else precision.param_dtype,
        reduce_dtype=precision.reduce_dtype,
        cast_forward_inputs=False,  # autocast decides; FSDP2 would also cast inputs of float32 modules
    )


def to_deepspeed_config(precision: Precision) -> dict[str, Any]:
    """Return what DeepSpeed's config says about the precision, to be merged into it.

    Mixed precisions are torch's autocast over float32 weights. `bf16-true` is DeepSpeed's own bfloat16 engine, whose
    `bf16` block Lightning adds from the name of the precision plugin; `32-true` needs nothing.
    """
    if not precision.is_mixed:
        return {}
    return {
        "torch_autocast": {
            "enabled": True,
            "dtype": str(precision.compute_dtype).removeprefix("torch."),
            "lower_precision_safe_modules": [],  # none: all weights are gathered and reduced in float32
        }
    }
