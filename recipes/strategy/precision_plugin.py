"""Lightning precision plugins: autocast with an overflow-counting loss scaler, half weights, or plain float32.

Dtypes and the FSDP2 and DeepSpeed settings are in `recipes.precision`, which does not need Lightning.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import DeepSpeedPrecision, HalfPrecision, MixedPrecision
from lightning.pytorch.plugins import Precision as Plugin
from torch.distributed.tensor import DTensor
from typing_extensions import override

from recipes.lightning_internals import is_accumulating
from recipes.parallel.placement import local
from recipes.precision import Precision
from recipes.strategy import get_local_device


class CountingScaler(torch.amp.GradScaler):
    """Dynamic loss scaler that counts the optimizer steps it skips.

    Correct for gradients with any mix of placements. torch 2.13 reduces the overflow flag as if all gradients were
    placed like the first, so that some ranks would step and others not.

    Attributes:
        num_overflows: Optimizer steps skipped because a gradient was not finite.
    """

    num_overflows: int = 0

    @override
    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        # torch 2.13 copies both to the gradients' device asynchronously. Offloaded gradients are on the host, where
        # the kernel would read the copies before they arrive
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not parameters:  # a frozen pipeline stage, which steps or not as the others do
            dist.all_reduce(found_inf, dist.ReduceOp.MAX)
            return {found_inf.device: found_inf}
        device = get_local_device(parameters)
        inv_scale, found_inf = inv_scale.to(device), found_inf.to(device)
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        shards = [grad for grad in grads if isinstance(grad, DTensor)]
        if not shards:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        # first for this rank's shards, then over all ranks, which step together or not at all
        parts = [local(grad) for grad in grads]
        torch._amp_foreach_non_finite_check_and_unscale_(parts, found_inf, inv_scale)
        flag = found_inf.to(shards[0].device_mesh.device_type)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return {device: flag.to(device)}

    @override
    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> float | None:
        result = super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        # the call above has just read the flags on the host, so this does not synchronize
        flags = optimizer_state["found_inf_per_device"].values()
        self.num_overflows += any(flag.item() for flag in flags)
        return result


class ZeroPrecision(DeepSpeedPrecision):
    """Autocast for mixed precision; runs the hooks before the optimizer step once per step, not per micro-batch.

    Lightning calls them for every micro-batch (#19350, 2.6.6).
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        super().__init__("bf16-true" if precision.name == "bf16-true" else "32-true")
        self.compute_dtype = precision.compute_dtype
        self._is_mixed = precision.is_mixed
        self._device_type = device.type

    @override
    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Autocast for forward passes that do not go through DeepSpeed's engine."""
        dtype = self.compute_dtype if self._is_mixed else None
        with torch.autocast(self._device_type, dtype, enabled=self._is_mixed):
            yield

    @override
    def _after_closure(self, model: Any, optimizer: Any) -> None:
        if not is_accumulating(model.trainer):
            super()._after_closure(model, optimizer)


def to_lightning_plugin(precision: Precision, device: torch.device) -> Plugin:
    """Return the plugin that Lightning's single-device, DDP and FSDP2 strategies need."""
    if precision.is_mixed:
        scaler = CountingScaler(device.type) if precision.scales_loss else None
        return MixedPrecision("16-mixed" if scaler is not None else "bf16-mixed", device.type, scaler)
    return HalfPrecision("bf16-true") if precision.name == "bf16-true" else Plugin()


def get_loss_scale(plugin: Plugin) -> float | None:
    """Return the current loss scale, read from the device; None if the loss is not scaled."""
    scaler = getattr(plugin, "scaler", None)
    return None if scaler is None else float(scaler.get_scale())


def get_num_overflows(plugin: Plugin) -> int:
    """Return the optimizer steps skipped so far in this process."""
    scaler = getattr(plugin, "scaler", None)
    return 0 if scaler is None else scaler.num_overflows
