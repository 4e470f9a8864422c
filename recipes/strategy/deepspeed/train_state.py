"""In-memory train state of a ZeRO optimizer: master weights, optimizer state and low-precision weights.

Yields references, one sub-group at a time where state is on disk; no collectives.
"""

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from recipes.strategy.deepspeed.checkpoint import advance_step_count, flat_weights, is_stage_3
from recipes.strategy.deepspeed.checkpoint_stage3 import in_memory

_COUNTERS = ("global_steps", "global_samples", "micro_steps")


class TrainStateMixin:
    """Gives snapshots access to the train state of a strategy."""

    optimizers: list[Any]
    lightning_module: Any
    deepspeed_engine: Any

    def live_tensors(self, *, writes_back: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor that a step changes, with its name.

        Args:
            writes_back: Whether the caller overwrites the tensors; low-precision weights are then refreshed from the
                master weights.
        """
        optimizer, module = self.optimizers[0], self.lightning_module
        if is_stage_3(optimizer):
            yield from _stage_3(optimizer, module, writes_back=writes_back)
        else:
            yield from _stages_1_and_2(optimizer, module)
        persistent = module.state_dict(keep_vars=True)
        for name, buffer in module.named_buffers():
            if name in persistent:
                yield f"buffer/{name}", buffer

    def forget_tensors(self, names: list[str]) -> None:
        """Remove optimizer state that was created after a snapshot.

        Args:
            names: Names from `live_tensors`.
        """
        flats = flat_weights(self.optimizers[0])
        for name in names:
            kind, _, rest = name.partition("/")
            if kind == "moment":
                moment, _, index = rest.rpartition("/")
                self.optimizers[0].optimizer.state[flats[int(index)]].pop(moment)

    def live_scalars(self) -> dict[str, Any]:
        """Return the non-tensor state: the engine's counters, integer step counts, the loss scale."""
        optimizer = self.optimizers[0]
        return {
            "engine": {name: getattr(self.deepspeed_engine, name) for name in _COUNTERS},
            "scaler": copy.deepcopy(vars(optimizer.loss_scaler)),
            "counts": [_counts(optimizer, flat) for flat in flat_weights(optimizer)],
        }

    def restore_scalars(self, numbers: dict[str, Any]) -> None:
        """Restore the scalars that `live_scalars` returned."""
        optimizer = self.optimizers[0]
        for name, value in numbers["engine"].items():
            setattr(self.deepspeed_engine, name, value)
        vars(optimizer.loss_scaler).update(numbers["scaler"])
        for flat, counts in zip(flat_weights(optimizer), numbers["counts"], strict=True):
            if counts:
                optimizer.optimizer.state[flat].update(counts)
        if type(optimizer.optimizer).__name__ == "DeepSpeedCPUAdam":
            advance_step_count(optimizer.optimizer, numbers["counts"][0]["step"])


def _stages_1_and_2(optimizer: Any, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for index, flat in enumerate(optimizer.single_partition_of_fp32_groups):
        yield f"master/{index}", flat.data
        yield from _moments(optimizer, flat, index)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:  # frozen weights under an adapter never change
            yield f"weight/{name}", parameter.data


def _stage_3(optimizer: Any, module: nn.Module, *, writes_back: bool) -> Iterator[tuple[str, Tensor]]:
    for index in range(len(optimizer.fp16_groups)):
        with in_memory(optimizer, index, writes_back=writes_back) as flat:
            yield f"master/{index}", flat.data
            yield from _moments(optimizer, flat, index)
            if writes_back:
                # after the caller has overwritten the master weights, before they leave memory
                optimizer._reassign_or_swap_out_partitioned_parameters(index)
    for name, parameter in module.named_parameters():
        # small parameters stay gathered; the loop above does not refresh that copy
        if parameter.requires_grad and parameter.numel() == parameter.ds_numel:  # type: ignore[attr-defined]
            yield f"weight/{name}", parameter.data


def _moments(optimizer: Any, flat: Tensor, index: int) -> Iterator[tuple[str, Tensor]]:
    for name, value in optimizer.optimizer.state.get(flat, {}).items():
        if isinstance(value, Tensor):
            yield f"moment/{name}/{index}", value


def _counts(optimizer: Any, flat: Tensor) -> dict[str, Any]:
    state = optimizer.optimizer.state.get(flat, {})
    return {key: value for key, value in state.items() if not isinstance(value, Tensor)}
