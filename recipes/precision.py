"""What each precision word means: the dtype of weights, of products and of gradient reduction."""

from dataclasses import dataclass
from typing import Literal

import torch

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Three dtypes behind one of Lightning's words.

    Attributes:
        name: The word that Lightning's Trainer takes: `32-true`, `bf16-mixed`, `16-mixed`, `bf16-true`.
        param: Dtype of weights and optimizer state.
        compute: Dtype of matrix products.
        reduce: Dtype in which gradients are summed over ranks.
    """

    name: Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true"]
    param: Literal["float32", "bfloat16", "float16"]
    compute: Literal["float32", "bfloat16", "float16"]
    reduce: Literal["float32", "bfloat16", "float16"]

    @property
    def param_dtype(self) -> torch.dtype:
        return _TORCH[self.param]

    @property
    def compute_dtype(self) -> torch.dtype:
        return _TORCH[self.compute]

    @property
    def scales_loss(self) -> bool:
        """Whether gradients carry a loss scale until the optimizer step (float16 alone needs one)."""
        return self.compute == "float16"


_TORCH: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
