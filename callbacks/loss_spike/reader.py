"""A step's loss and norm from the guard to the host: at once on a CPU, one step late on a GPU, nobody waits."""

import math

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from .monitor import SpikeMonitor, StepMeasurement, Verdict
from .step_guard import OwnGuard, StepGuard, guards_itself, keep_buffers


class StepReader:
    """For one call of `fit`: guards every step and has it judged.

    Args:
        watch: Judges, and sets the guard's limits.
        trainer: Of the run.
        pl_module: Takes the guard, or is guarded from outside.
    """

    def __init__(self, watch: SpikeMonitor, trainer: Trainer, pl_module: LightningModule) -> None:
        self._watch = watch
        self._guard = StepGuard()
        self._own_guard = None if guards_itself(pl_module) else OwnGuard(self._guard)
        if self._own_guard is None:
            pl_module.guard_steps(self._guard)  # type: ignore[operator]
        self._late = DelayedReadback()
        self._num_overflows = _num_overflows(trainer)
        self._buffers: list[tuple[Tensor, Tensor]] = []  # with copies of before the step
        self.set_limits()

    @property
    def loss(self) -> Tensor | None:
        """Of the step about to be made, over all ranks."""
        return self._guard.loss

    def set_limits(self) -> None:
        """For the next step, from all that has been seen."""
        self._guard.largest_loss, self._guard.largest_norm = self._watch.limits()

    def begin_batch(self, pl_module: LightningModule) -> None:
        """At the start of every micro-batch; the first of a step changes buffers, refused or not."""
        if not self._buffers:
            self._buffers = [(one, one.clone()) for one in pl_module.buffers()]

    def add_loss(self, trainer: Trainer, loss: Tensor) -> None:
        """Before every backward pass."""
        if self._own_guard is not None:
            self._own_guard.add_loss(trainer, loss)

    def guard_step(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Before every step."""
        if self._own_guard is not None:
            self._own_guard.guard_step(trainer, optimizer)

    def read(self, trainer: Trainer) -> Verdict | None:
        """After a step: what is known by now, on a GPU about the step before; None: nothing."""
        guard = self._guard
        keep_buffers(self._buffers, guard.refused)
        self._buffers = []
        if guard.loss is None or guard.refused is None:
            return None
        norm = guard.norm if guard.norm is not None else torch.tensor(math.nan)
        before, self._num_overflows = self._num_overflows, _num_overflows(trainer)
        by_scaler = torch.full_like(norm, self._num_overflows - before)  # goes with its own step
        values = [guard.loss.to(norm.device), norm, guard.refused, by_scaler]
        return self._judged(trainer, self._late.exchange(trainer.global_step, values))

    def read_last(self, trainer: Trainer) -> Verdict | None:
        """When training ends: what is still under way."""
        return self._judged(trainer, self._late.take())

    def go_back(self) -> None:
        """After a rollback: what is under way is undone."""
        self._late.forget()
        self.set_limits()

    def _judged(self, trainer: Trainer, ready: tuple[int, list[float]] | None) -> Verdict | None:
        if ready is None:
            return None
        step, (loss, norm, refused, by_scaler) = ready
        reading = StepMeasurement(step=step, loss=loss, norm=norm, refused=bool(refused))
        overflowed = by_scaler > 0
        if self._own_guard is not None and not math.isfinite(norm):  # nobody counts for us
            overflowed = getattr(trainer.precision_plugin, "scaler", None) is not None
        return self._watch.judge(reading, overflowed=overflowed)


def _num_overflows(trainer: Trainer) -> int:
    """Steps that a loss scaler has skipped, where somebody counts them; no device is asked."""
    return int(getattr(trainer.strategy, "num_overflows", 0))


class DelayedReadback:
    """A queue of one. Every rank runs on the same kind of device, so all are as late."""

    def __init__(self) -> None:
        self._under_way: tuple[int, Tensor, torch.cuda.Event] | None = None

    def exchange(self, step: int, values: list[Tensor]) -> tuple[int, list[float]] | None:
        """Hand in the numbers of a step; those that are ready, with their step; None: none are.

        Args:
            step: Whose numbers they are.
            values: 0-dim tensors.
        """
        packed = torch.stack([value.detach().double() for value in values])  # [number of values]
        if not packed.is_cuda:
            return step, packed.tolist()
        ready = self.take()
        self._under_way = self._send(step, packed)
        return ready

    def take(self) -> tuple[int, list[float]] | None:
        """What is under way, waited for."""
        if self._under_way is None:
            return None
        (step, numbers, copied), self._under_way = self._under_way, None
        copied.synchronize()
        return step, numbers.tolist()

    def forget(self) -> None:
        """After a rollback: what is under way belongs to a past that is undone."""
        self._under_way = None

    @staticmethod
    def _send(step: int, packed: Tensor) -> tuple[int, Tensor, torch.cuda.Event]:
        numbers = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        numbers.copy_(packed, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return step, numbers, copied
