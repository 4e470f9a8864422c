"""What each precision word means: the dtype of weights, of products and of gradient reduction."""

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, kw_only=True)
class Precision:
    """One of Lightning's words.

    Attributes:
        name: The word.
    """

    name: Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true"]

    @property
    def param_dtype(self) -> torch.dtype:
        """Of weights and optimizer state."""
        return _DTYPES[self.name][0]

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of matrix products."""
        return _DTYPES[self.name][1]

    @property
    def reduce_dtype(self) -> torch.dtype:
        """In which gradients are summed over ranks."""
        return _DTYPES[self.name][2]

    @property
    def scales_loss(self) -> bool:
        """Whether gradients carry a loss scale until the optimizer step; float16 alone needs one."""
        return self.compute_dtype == torch.float16


_DTYPES: dict[str, tuple[torch.dtype, torch.dtype, torch.dtype]] = {
    "32-true": (torch.float32, torch.float32, torch.float32),
    "bf16-mixed": (torch.float32, torch.bfloat16, torch.float32),
    "16-mixed": (torch.float32, torch.float16, torch.float32),
    "bf16-true": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
}
