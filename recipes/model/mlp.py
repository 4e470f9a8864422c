"""Multilayer perceptron for rows of numbers.

Shapes: B rows, F inputs, V classes, labels or numbers.
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.model.init import constant_, named_parameters, normal_
from recipes.model.norm import InPlaceOfBatchNorm, replace_batch_norms

Activation = Literal["relu", "gelu", "silu", "tanh"]
HEAD_STD = 0.01  # outputs begin near 0: a uniform guess of classes, and the mean of standardized numbers
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


class HiddenLayer(nn.Module):
    """Linear map, norm, activation and dropout."""

    def __init__(self, num_inputs: int, width: int, *, activation: Activation, dropout: float, norm: str) -> None:
        super().__init__()
        self.linear = nn.Linear(num_inputs, width)
        norms: dict[str, type[nn.Module]] = {"none": nn.Identity, "layer": nn.LayerNorm}
        self.norm = norms.get(norm, nn.BatchNorm1d)(width)
        self.dropout = nn.Dropout(dropout)
        self._activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """[B, F] -> [B, width]"""
        hidden: Tensor = self.dropout(_ACTIVATIONS[self._activation](self.norm(self.linear(x))))
        return hidden


class MLP(nn.Module):
    """Hidden layers and a linear head: rows [B, F] float -> outputs [B, V].

    Args:
        num_inputs: F.
        num_classes: V.
        hidden_sizes: Width of each hidden layer; none: a linear model.
        activation: Of the hidden layers.
        dropout: Probability of dropout after each hidden layer.
        norm: Before each activation: `layer`, `batch`, `sync` (batch norm over all ranks, see `recipes.model.norm`) or
            `none`.
    """

    input_kind: ClassVar[str] = "tensors"
    new_head_with: ClassVar[tuple[str, ...]] = ("num_classes",)  # start_from= may change it

    def __init__(
        self,
        *,
        num_inputs: Annotated[int, ">= 1"],
        num_classes: Annotated[int, ">= 1"],
        hidden_sizes: Sequence[Annotated[int, ">= 1"]],
        activation: Activation,
        dropout: Annotated[float, ">= 0, < 1"],
        norm: Literal["none", "layer", "batch", "sync"],
    ) -> None:
        super().__init__()
        self.num_inputs = num_inputs
        self.num_classes = num_classes
        self.blocks = nn.ModuleList()
        for width in hidden_sizes:
            self.blocks.append(HiddenLayer(num_inputs, width, activation=activation, dropout=dropout, norm=norm))
            num_inputs = width
        self.head = nn.Linear(num_inputs, num_classes)
        if norm == "sync" and hidden_sizes:
            replace_batch_norms(self, norm)

    def forward(self, rows: Tensor) -> Tensor:
        """Rows [B, F] float -> outputs [B, V] in the compute dtype."""
        x = rows
        for block in self.blocks:
            x = block(x)
        outputs: Tensor = self.head(x)
        return outputs

    def init_weights(self, seed: int) -> None:
        """Initialize every parameter and buffer in place, from (seed, name, shape).

        Matrices normal with standard deviation sqrt(2 / fan_in) (He et al. 2015, arXiv:1502.01852), that of the head
        0.01; gains of norms 1; biases 0.
        """
        for name, parameter in named_parameters(self):
            if parameter.dim() == 2:
                std = HEAD_STD if name == "head.weight" else math.sqrt(2.0 / parameter.shape[1])
                normal_(parameter, name=name, seed=seed, std=std)
            else:
                constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
        self.init_buffers()

    @torch.no_grad()
    def init_buffers(self) -> None:
        """Set running means to 0, variances to 1, counts to 0."""
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d | InPlaceOfBatchNorm):
                module.reset_running_stats()
