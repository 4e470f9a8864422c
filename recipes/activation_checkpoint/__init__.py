"""Activation checkpointing: recompute the activations of blocks, or offload them to host memory.

Every option gives the same loss and gradients, bit for bit in eager mode: what is recomputed draws the random numbers
of the forward pass again, or they are kept. `recompute` recomputes activations in the backward pass instead of saving
them; `host_offload` saves them in host memory.
"""

import contextlib
import sys
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from torch import nn

from recipes.activation_checkpoint.entered import Entered, enter_calls
from recipes.activation_checkpoint.host_offload import HostOffload
from recipes.activation_checkpoint.recompute import recompute_block
from recipes.torch_internals import inductor_config, partitioner_config

_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpoint:
    """Settings for recomputing block activations or offloading them to host memory.

    Attributes:
        every_nth_block: 1 recomputes all blocks, 2 every second one, 0 none.
        save_ops: Tensors that a recomputed block saves: only its inputs, or also the outputs of matmuls, convolutions
            and attention, so that only cheaper operations are recomputed.
        keep_every_nth_product: With `save_ops=products`, 2 saves every second matmul.
        memory_budget: Fraction of a compiled block's activations that torch's partitioner may save; it recomputes the
            cheapest ones. None uses torch's default.
        offload: Copy saved activations to host memory, and prefetch them one block ahead in the backward pass.
        offload_min_mib: Smaller tensors stay on the device.
    """

    every_nth_block: Annotated[int, ">= 0"]
    save_ops: Literal["inputs", "products"] = "inputs"
    keep_every_nth_product: Annotated[int, ">= 1"] = 1
    memory_budget: Annotated[float, ">= 0, <= 1"] | None = None
    offload: bool = False
    offload_min_mib: Annotated[float, ">= 0"] = 1.0

    @property
    def changes_blocks(self) -> bool:
        """Whether these settings require a model with blocks."""
        return self.every_nth_block > 0 or self.memory_budget is not None or self.offload

    def recomputes(self, index: int) -> bool:
        """Return whether the block at this index is recomputed."""
        return self.every_nth_block > 0 and index % self.every_nth_block == 0

    def apply(self, blocks: Collection[nn.Module]) -> None:
        """Modify the blocks in place, in the order in which they run, before they are compiled and sharded.

        Wraps methods instead of modules, so that parameter names, and thus checkpoints, stay the same.
        """
        offload = HostOffload(min_bytes=int(self.offload_min_mib * _MIB)) if self.offload else None
        kept = self.keep_every_nth_product if self.save_ops == "products" else None
        for index, block in enumerate(blocks):
            if self.recomputes(index):
                recompute_block(block, keep_every_nth_product=kept, offload=offload)
            entered: list[Entered] = []
            if self.memory_budget is not None:
                entered.append(_with_budget(self.memory_budget))
            if offload is not None:
                entered.append(offload.saving(is_first=index == 0, is_last=index == len(blocks) - 1))
            if entered:
                enter_calls(block, entered)


def _with_budget(fraction: float) -> Entered:
    """Return a context that sets the budget while a block runs; the first call compiles the block."""
    from recipes.activation_checkpoint.recompute import KeepRandomNumbers

    patch_budget: Callable[..., Any] = partitioner_config.patch
    patch_passes: Callable[..., Any] = inductor_config.patch
    # a budget of 0 ignores which results must be kept, the smallest one above it does not
    budget = max(fraction, sys.float_info.min)
    keep_random_numbers = KeepRandomNumbers()

    @contextlib.contextmanager
    def apply() -> Generator[None, None, None]:
        with patch_budget(activation_memory_budget=budget), patch_passes(joint_custom_post_pass=keep_random_numbers):
            yield

    def enter(block: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return apply()

    return enter
