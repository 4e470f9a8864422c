"""A precision word as Lightning's plugin: autocast with a loss scaler that counts, half weights, or nothing."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.plugins import DeepSpeedPrecision, HalfPrecision, MixedPrecision
from lightning.pytorch.plugins import Precision as Plugin

from recipes.precision import Precision


class CountingScaler(torch.amp.GradScaler):
    """A dynamic loss scale that knows how many optimizer steps it has skipped. Right on shards: torch reduces
    the overflow flag of DTensor gradients over their mesh.

    Attributes:
        num_overflows: Optimizer steps skipped because a gradient was not finite.
    """

    num_overflows: int = 0

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> float | None:
        result = super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        # read a moment ago by the line above: nothing is left to wait for
        flags = optimizer_state["found_inf_per_device"].values()
        self.num_overflows += any(flag.item() for flag in flags)
        return result


class ZeroPrecision(DeepSpeedPrecision):
    """Autocast for the mixed precisions; hooks before the optimizer step run once a step, not once a micro-batch.

    Lightning calls them for every micro-batch (#19350, 2.6.6).
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        super().__init__("bf16-true" if precision.name == "bf16-true" else "32-true")
        self.compute_dtype = precision.compute_dtype
        self._device_type = device.type

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """For forward passes that do not go through the engine."""
        mixed = self.compute_dtype != self._desired_dtype
        with torch.autocast(
            self._device_type, self.compute_dtype if mixed else None, enabled=mixed
        ):
            yield

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        if not model.trainer.fit_loop._should_accumulate():
            super()._after_closure(model, optimizer)


def lightning_plugin(precision: Precision, device: torch.device) -> Plugin:
    """What Lightning's single-device, DDP and FSDP2 strategies take for a precision word."""
    if precision.name in ("16-mixed", "bf16-mixed"):
        scaler = CountingScaler(device.type) if precision.scales_loss else None
        return MixedPrecision(precision.name, device.type, scaler)
    return HalfPrecision("bf16-true") if precision.name == "bf16-true" else Plugin()


def get_loss_scale(plugin: Plugin) -> float | None:
    """The present scale, read from the device; None where the loss is not scaled."""
    scaler = getattr(plugin, "scaler", None)
    return None if scaler is None else float(scaler.get_scale())


def get_num_overflows(plugin: Plugin) -> int:
    """Optimizer steps skipped so far in this process."""
    scaler = getattr(plugin, "scaler", None)
    return 0 if scaler is None else scaler.num_overflows
