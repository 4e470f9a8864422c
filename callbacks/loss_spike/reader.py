"""Read a step's loss and norm on the host without blocking: immediately on a CPU, one step late on a GPU."""

import math

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from ..protocols import SupportsCompletions
from .forward_buffers import ForwardBuffers
from .monitor import SpikeMonitor, StepMeasurement, Verdict
from .step_guard import FallbackGuard, StepGuard, SupportsStepGuard, get_scaler, has_step_hooks

# A loss scaler survives overflows by lowering its scale, but not below the smallest float16 above 0: at such a scale,
# gradients of ordinary size vanish
_SMALLEST_SCALE = 2.0**-24


class StepReader:
    """Guards every step of a `fit` and passes its loss and norm to the monitor.

    Args:
        monitor: Checks steps and sets the guard's limits.
        trainer: The trainer.
        pl_module: Receives the guard if it is a `SupportsStepGuard`; otherwise a `FallbackGuard` is used.
    """

    def __init__(self, monitor: SpikeMonitor, trainer: Trainer, pl_module: LightningModule) -> None:
        self._monitor = monitor
        self._guard = StepGuard()
        self._has_falling_loss = not isinstance(pl_module, SupportsCompletions)
        self._fallback: FallbackGuard | None = None
        if isinstance(pl_module, SupportsStepGuard):
            pl_module.recipes_guard_steps(self._guard)
        else:
            self._fallback = FallbackGuard(self._guard, trainer.optimizers)
        self._readback = DelayedReadback()
        self._num_overflows = _count_overflows(trainer)
        self._scale = math.inf  # after the previous step
        self._buffers = ForwardBuffers()
        self.set_limits()

    @property
    def loss(self) -> Tensor | None:
        """Mean loss of the current step over all ranks, a 0-dim tensor."""
        return self._guard.loss

    def set_limits(self) -> None:
        """Set the guard's limits for the next step, from all steps checked so far."""
        self._guard.max_loss, self._guard.max_norm = self._monitor.limits()

    def begin_batch(self, pl_module: LightningModule) -> None:
        """Copy the buffers before a step's first micro-batch changes them; call it before every micro-batch."""
        self._buffers.begin_batch(pl_module)

    def end_forward(self) -> None:
        """Note which buffers the forward pass has changed; call it after every forward pass, before other hooks."""
        self._buffers.end_forward()

    def add_loss(self, trainer: Trainer, loss: Tensor) -> None:
        """Add the loss of a micro-batch; call it before every backward pass."""
        if self._fallback is not None:
            self._fallback.add_loss(trainer, loss)

    def guard_step(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Decide whether to skip the current step; call it before every optimizer step."""
        if self._fallback is not None:
            self._fallback.guard_step(trainer, optimizer)

    def read(self, trainer: Trainer) -> Verdict | None:
        """Return the newest verdict after a step: on a GPU, that of the previous step; None if there is none yet."""
        guard = self._guard
        self._buffers.end_step(guard.skipped)
        if guard.loss is None or guard.skipped is None:
            return None
        norm = guard.norm if guard.norm is not None else torch.tensor(math.nan)
        before, self._num_overflows = self._num_overflows, _count_overflows(trainer)
        # overflow count and loss scale are queued with their own step, which may be read one step later
        by_scaler = torch.full_like(norm, self._num_overflows - before)
        values = [guard.loss.to(norm.device), norm, guard.skipped, by_scaler, _get_scale(trainer, norm)]
        return self._judge(trainer, self._readback.exchange(trainer.global_step, values))

    def read_last(self, trainer: Trainer) -> Verdict | None:
        """Return the verdict on the pending step when training ends; None if no step is pending."""
        return self._judge(trainer, self._readback.take())

    def end(self) -> None:
        """Stop guarding steps."""
        if self._fallback is not None:
            self._fallback.remove()

    def roll_back(self) -> None:
        """Drop the pending step, which was rolled back as well."""
        self._readback.drop()
        self._scale = math.inf
        self.set_limits()

    def _judge(self, trainer: Trainer, ready: tuple[int, list[float]] | None) -> Verdict | None:
        if ready is None:
            return None
        step, (loss, norm, skipped, by_scaler, scale) = ready
        measurement = StepMeasurement(step=step, loss=loss, norm=norm, skipped=bool(skipped))
        overflowed = by_scaler > 0
        if self._fallback is not None and not math.isfinite(norm):
            overflowed = get_scaler(trainer) is not None  # Lightning's own strategies do not count overflows
        before, self._scale = self._scale, scale
        overflowed = overflowed and _SMALLEST_SCALE <= scale < before
        return self._monitor.judge(measurement, overflowed=overflowed, has_falling_loss=self._has_falling_loss)


def why_not_guarded(trainer: Trainer, pl_module: LightningModule) -> str | None:
    """Return the reason why the run's steps cannot be guarded; None if they can."""
    if not pl_module.automatic_optimization:
        return "the module uses manual optimization"
    if isinstance(pl_module, SupportsStepGuard) or all(map(has_step_hooks, trainer.optimizers)):
        return None
    return "an optimizer has no step hooks, as torch.optim.Optimizer has once its __init__ was called"


def _count_overflows(trainer: Trainer) -> int:
    """Return the steps skipped by a loss scaler, 0 if the strategy does not count them; does not read the device."""
    return int(getattr(trainer.strategy, "num_overflows", 0))


def _get_scale(trainer: Trainer, norm: Tensor) -> Tensor:
    """Return the loss scale, 0-dim on the device of the norm, without reading it; inf without a scale."""
    scaler = get_scaler(trainer)
    if scaler is not None and scaler._scale is not None:  # a tensor from the first scaled loss on
        scale: Tensor = scaler._scale.to(norm)
        return scale
    # without a scaler, a number on the host
    number = getattr(trainer.strategy, "current_loss_scale", None) if scaler is None else None
    return torch.full_like(norm, math.inf if number is None else number)


class DelayedReadback:
    """A one-element queue from device to host; all ranks use the same device type and thus have the same delay."""

    def __init__(self) -> None:
        self._pending: tuple[int, Tensor, torch.cuda.Event | None] | None = None  # no event if already on the host

    def exchange(self, step: int, values: list[Tensor]) -> tuple[int, list[float]] | None:
        """Start copying the scalars of a step; return the scalars that have arrived, with their step.

        Args:
            step: Step that the scalars belong to.
            values: 0-dim tensors.

        Returns:
            (step, scalars); None if none have arrived.
        """
        packed = torch.stack([value.detach().double() for value in values])  # [number of values]
        if not packed.is_cuda and self._pending is None:
            return step, packed.tolist()
        ready = self.take()
        # values already on the host, such as an overflow under DeepSpeed, still queue behind the previous step
        self._pending = self._send(step, packed) if packed.is_cuda else (step, packed, None)
        return ready

    def take(self) -> tuple[int, list[float]] | None:
        """Wait for the pending scalars and return them; None if none are pending."""
        if self._pending is None:
            return None
        (step, scalars, copied), self._pending = self._pending, None
        if copied is not None:
            copied.synchronize()
        return step, scalars.tolist()

    def drop(self) -> None:
        """Drop the pending scalars."""
        self._pending = None

    @staticmethod
    def _send(step: int, packed: Tensor) -> tuple[int, Tensor, torch.cuda.Event]:
        scalars = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)  # [number of values]
        scalars.copy_(packed, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return step, scalars, copied
