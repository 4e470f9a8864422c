"""Precision options: dtypes of weights, matmuls and gradient reduction, for every engine.

This module needs only torch: the dtypes and DeepSpeed's config block. The Lightning plugins are built in
`recipes.strategy.precision_plugin`, because this module must not import Lightning; FSDP2's policy in `sharding`.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Precision:
    """One `precision=` option.

    Attributes:
        name: Name in Lightning, where `tf32` is `32-true` and `fp8-mixed` is `bf16-mixed`.
    """

    name: Literal["32-true", "tf32", "bf16-mixed", "16-mixed", "bf16-true", "fp8-mixed"]

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
        """Whether autocast runs matmuls in a lower precision than that of the weights."""
        return self.compute_dtype != self.param_dtype

    @property
    def replaces_products(self) -> bool:
        """Whether `convert_products` replaces layers, which then save weights in their own dtype, not in autocast's."""
        return False

    def convert(self, model: nn.Module, *, shards_weights: bool) -> None:
        """Replace modules of a model on the meta device as this precision requires; none by default."""

    def convert_products(self, module: nn.Module, *, shards_weights: bool) -> None:
        """Replace the linear layers inside a module, a tower of blocks or a block, for `convert`; none by default."""

    @property
    def scales_loss(self) -> bool:
        """Whether gradients carry a loss scale until the optimizer step; only float16 needs one."""
        return self.compute_dtype == torch.float16


# weights, matmuls, gradient reduction
_DTYPES: dict[str, tuple[torch.dtype, torch.dtype, torch.dtype]] = {
    "32-true": (torch.float32, torch.float32, torch.float32),
    "tf32": (torch.float32, torch.float32, torch.float32),
    "bf16-mixed": (torch.float32, torch.bfloat16, torch.float32),
    "16-mixed": (torch.float32, torch.float16, torch.float32),
    "bf16-true": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "fp8-mixed": (torch.float32, torch.bfloat16, torch.float32),  # matmuls outside blocks
}


def set_float32_products(precision: Precision) -> None:
    """Enable or disable TF32 for float32 matmuls, convolutions and recurrent layers on GPUs, for the whole process.

    TF32 rounds inputs to 10 mantissa bits, like float16, and accumulates in float32. By default, torch 2.13 allows it
    for convolutions and recurrent layers but not for matmuls; `32-true` disables all.
    """
    kind = "tf32" if precision.name == "tf32" else "ieee"
    cudnn: Any = torch.backends.cudnn
    torch.backends.cuda.matmul.fp32_precision = kind
    cudnn.conv.fp32_precision = kind
    cudnn.rnn.fp32_precision = kind


def to_deepspeed_config(precision: Precision) -> dict[str, Any]:
    """Return the precision settings to merge into the DeepSpeed config.

    Mixed precisions are torch's autocast over float32 weights. `bf16-true` is DeepSpeed's own bfloat16 engine, whose
    `bf16` block Lightning adds from the name of the precision plugin; `32-true` needs nothing.
    """
    if not precision.is_mixed:
        return {}
    return {
        "torch_autocast": {
            "enabled": True,
            "dtype": str(precision.compute_dtype).removeprefix("torch."),
            "lower_precision_safe_modules": [],  # none: DeepSpeed would also reduce their gradients in low precision
        }
    }
