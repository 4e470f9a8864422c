"""Matrix products of the blocks in float8, by torchao's `Float8Linear`: for Hopper, Ada and Blackwell GPUs.

The weights stay float32 and everything else is as under `bf16-mixed`. Each product casts its factors with a scale of
its own, from their largest value at that moment, so there is no state to save.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from recipes.errors import ConfigError
from recipes.precision import Precision

_MULTIPLE = 16  # of both sides of a matrix, which the float8 units need
_LEAST_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0


@dataclass(frozen=True, kw_only=True)
class Float8Precision(Precision):
    """The `precision=` option that computes in float8.

    Attributes:
        name: As for `Precision`.
        scaling: One scale a tensor, or one a row, which is more exact and slower.
        emulate: Compute in float32 what the float8 units would: slow, on any device.
    """

    name: Literal["fp8-mixed"]
    scaling: Literal["tensorwise", "rowwise"]
    emulate: bool

    def convert(self, model: nn.Module, *, shards_weights: bool) -> None:
        """Let the matrices of all blocks compute in float8, in place; names and values stay the same.

        Args:
            model: On the meta device, with `blocks`; one without is left as it is.
            shards_weights: Whether FSDP2 will gather the weights: those with one scale a tensor are then gathered in
                float8, which sends half as much as bfloat16, and rounds once, as on one device.

        Raises:
            ConfigError: The GPU has no float8 units.
        """
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        if not self.emulate and torch.cuda.get_device_capability() < _LEAST_CAPABILITY:
            raise ConfigError(
                "precision=fp8-mixed",
                f"{torch.cuda.get_device_name()} has no float8 units",
                "precision=bf16-mixed",
            )
        config = dataclasses.replace(
            Float8LinearConfig.from_recipe_name(self.scaling),
            emulate=self.emulate,
            enable_fsdp_float8_all_gather=shards_weights and self.scaling == "tensorwise",
        )
        blocks = getattr(model, "blocks", None)
        if blocks is not None:
            convert_to_float8_training(blocks, config=config, module_filter_fn=_fits)


def _fits(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and not any(size % _MULTIPLE for size in module.weight.shape)


def unwrap(local: Tensor) -> Tensor:
    """Return a plain tensor of the same storage for a shard that torchao casts when FSDP2 gathers it."""
    inner = getattr(local, "_tensor", None)
    return inner if isinstance(inner, Tensor) else local
