"""A residual perceptron. Shapes: B samples, W width, C classes."""

from typing import ClassVar

from lightning_recipes.recipes.model.init import constant_, named_parameters, normal_
from torch import Tensor, nn


class Block(nn.Module):
    """Add a hidden layer to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, W] -> [B, W]"""
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


class Classifier(nn.Module):
    """Classify points in a plane; the arguments are the settings of conf/model/classifier.yaml."""

    input_kind: ClassVar[str] = "tensors"

    def __init__(self, *, num_classes: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.stem = nn.Linear(2, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_layers))  # what FSDP2 shards, and compile compiles
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Points [B, 2] -> logits [B, C]"""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits

    def init_weights(self, seed: int) -> None:
        """Set every parameter in place, from (seed, name, shape)."""
        for name, parameter in named_parameters(self):
            if name.endswith("norm.weight"):
                constant_(parameter, 1.0)
            elif parameter.ndim == 1:
                constant_(parameter, 0.0)
            else:
                normal_(parameter, name=name, seed=seed, std=parameter.shape[1] ** -0.5)

    def init_buffers(self) -> None:
        """Do nothing: the model has no buffers."""
