"""Float8 matmuls in the blocks with torchao's `Float8Linear`, for Ada, Hopper and Blackwell GPUs.

The weights stay float32 and everything else is as under `bf16-mixed`. Scaling is dynamic, so there is no state to
save.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from recipes.blocks import named_blocks
from recipes.errors import ConfigError
from recipes.numerics.torchao_import import without_warnings_of_torchao
from recipes.precision import Precision

_MULTIPLE = 16  # both dimensions of a matrix must be multiples of this for float8 tensor cores
_LEAST_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0


@dataclass(frozen=True, kw_only=True)
class Float8Precision(Precision):
    """The `precision=` option that computes in float8.

    Attributes:
        name: As for `Precision`.
        scaling: One scale per tensor, or one per row, which is more accurate but slower.
        emulate: Emulate float8 in float32: slow, but works on any device.
    """

    name: Literal["fp8-mixed"]
    scaling: Literal["tensorwise", "rowwise"]
    emulate: bool

    @property
    @override
    def replaces_products(self) -> bool:
        return True

    @override
    def convert(self, model: nn.Module, *, shards_weights: bool) -> None:
        """Convert the linear layers of all blocks to float8 matmuls in place, keeping names and values.

        Args:
            model: Model on the meta device; unchanged if it has no blocks.
            shards_weights: Whether FSDP2 gathers the weights: with tensorwise scaling they are then gathered in float8,
                which sends half as much as bfloat16, and rounds once, as on one device.

        Raises:
            ConfigError: The GPU does not support float8.
        """
        if not self.emulate and torch.cuda.get_device_capability() < _LEAST_CAPABILITY:
            raise ConfigError(
                "precision=fp8-mixed",
                f"{torch.cuda.get_device_name()} has no float8 units",
                "precision=bf16-mixed",
            )
        for tower in named_blocks(model).values():
            self.convert_products(tower, shards_weights=shards_weights)

    @override
    def convert_products(self, module: nn.Module, *, shards_weights: bool) -> None:
        with without_warnings_of_torchao():
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = dataclasses.replace(
            Float8LinearConfig.from_recipe_name(self.scaling),
            emulate=self.emulate,
            enable_fsdp_float8_all_gather=shards_weights and self.scaling == "tensorwise",
        )
        convert_to_float8_training(module, config=config, module_filter_fn=_fits)


def _fits(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and not any(size % _MULTIPLE for size in module.weight.shape)


def unwrap(local: Tensor) -> Tensor:
    """Return the plain tensor inside a shard that torchao casts when FSDP2 gathers it, sharing its storage."""
    inner = getattr(local, "_tensor", None)
    return inner if isinstance(inner, Tensor) else local
