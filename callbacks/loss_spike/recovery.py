"""Recover a diverging run: restore a good state, skip data, lower the learning rate, or stop."""

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NoReturn

from lightning.pytorch import LightningModule, Trainer

from ..events import finite, log_event
from ..lightning_internals import forget_row, get_callbacks
from .escalation import Action, Response, SpikeEscalation
from .monitor import SpikeMonitor, Verdict
from .rollback import Rollback

log = logging.getLogger("lightning_recipes")
_SMALLEST = {  # in the order in which `Recovery` checks them
    "max_skips": 0,
    "max_non_finite": 0,
    "snapshot_every": 1,
    "num_snapshots": 2,
    "quarantine_steps": 1,
    "skip_batches": 0,
    "cooldown_steps": 1,
    "lr_backoff_steps": 1,
}
_CHOICES = {"action": ("warn", "skip", "repair", "rollback"), "snapshot_storage": ("auto", "memory", "disk")}
_SERIES_NAMES = {"loss": "loss", "norm": "gradient norm"}


class TrainingDivergedError(RuntimeError):
    """Training diverged and recovery has failed.

    Attributes:
        exit_code: Exit status for the process.
    """

    exit_code = 3


class Recovery:
    """Executes the responses that `SpikeEscalation` decides, and holds the state they need.

    Args:
        monitor: Spike monitor; its state is included in snapshots.
        action: Strongest response to spikes; see `SpikeEscalation`.
        max_skips: Spikes tolerated within `quarantine_steps`; the next one rolls back, or relearns the normal level.
        max_non_finite: Consecutive steps with NaN or inf tolerated; the next one rolls back, or stops the run.
        snapshot_every: Optimizer steps between snapshots.
        num_snapshots: Snapshots held, each the size of the weights plus optimizer state.
        quarantine_steps: Optimizer steps without a rollback after which a snapshot is good.
        snapshot_storage: `memory` (host), `disk` (run folder) or `auto`: memory if the snapshots fit.
        skip_batches: Optimizer steps' worth of data to skip after a rollback; 0 skips none.
        cooldown_steps: Rollbacks at most this many optimizer steps apart count as consecutive.
        lr_factor: Multiplier for the learning rates, from the second consecutive rollback on.
        lr_backoff_steps: Optimizer steps for which `lr_factor` applies.
        max_rollbacks: Consecutive rollbacks before the run stops.
        rewind_data: Also rewind the data; needs a data module with `position` and `move_to(position)`.

    Raises:
        ValueError: A setting is out of range, or every snapshot would be overwritten before its quarantine is over.
    """

    def __init__(
        self,
        *,
        monitor: SpikeMonitor,
        action: Action,
        max_skips: int,
        max_non_finite: int,
        snapshot_every: int,
        num_snapshots: int,
        quarantine_steps: int,
        snapshot_storage: Literal["auto", "memory", "disk"],
        skip_batches: int,
        cooldown_steps: int,
        lr_factor: float,
        lr_backoff_steps: int,
        max_rollbacks: int,
        rewind_data: bool,
    ) -> None:
        _check_choices(action=action, snapshot_storage=snapshot_storage)
        steps = (quarantine_steps, skip_batches, cooldown_steps, lr_backoff_steps)
        _check_counts((max_skips, max_non_finite, snapshot_every, num_snapshots, *steps))
        if not 0 < lr_factor < 1:
            raise ValueError(f"lr_factor={lr_factor}: it is to lower the learning rate; type a number between 0 and 1")
        longest = snapshot_every * (num_snapshots - 1)
        if quarantine_steps > longest:
            raise ValueError(
                f"num_snapshots={num_snapshots} every {snapshot_every} steps: each is overwritten before its"
                f" quarantine of {quarantine_steps} steps is over; type quarantine_steps={longest}"
            )
        self.lr_backoff = LearningRateBackoff()
        self.escalation = SpikeEscalation(
            action=action,
            max_skips=max_skips,
            max_non_finite=max_non_finite,
            window_steps=quarantine_steps,
            cooldown_steps=cooldown_steps,
            max_rollbacks=max_rollbacks,
        )
        self.rollback = Rollback(
            num_snapshots=num_snapshots,
            quarantine_steps=quarantine_steps,
            snapshot_storage=snapshot_storage,
        )
        self.monitor = monitor
        self.action = action
        self.snapshot_every = snapshot_every
        self.skip_batches = skip_batches
        self._lr_factor = lr_factor
        self._lr_backoff_steps = lr_backoff_steps
        self._rewind_data = rewind_data

    @property
    def rolls_back(self) -> bool:
        """Whether outliers can lead to a rollback, which needs snapshots."""
        return self.action in ("repair", "rollback")

    def count(self, verdict: Verdict) -> Response:
        """Count a step and return the response."""
        return self.escalation.step(
            skipped=verdict.skipped,
            outlier=verdict.is_outlier,
            non_finite=verdict.is_non_finite and not (verdict.is_harmless or verdict.overflowed),
            overflowed=verdict.is_non_finite and verdict.overflowed,
            drifts=verdict.drifts,
        )

    def take_snapshot(self, trainer: Trainer, *, is_good: bool = False) -> None:
        """Take a snapshot of the current state.

        Args:
            trainer: The trainer, at the end of a batch in which the optimizer has stepped.
            is_good: Whether the snapshot needs no quarantine.
        """
        self.rollback.take(
            trainer,
            clock=self.escalation.counts.clock,
            is_good=is_good,
            monitor=self.monitor.state_dict(),
            factor=self.lr_backoff.factor,
            position=get_datamodule(trainer).position if self._rewind_data else None,
        )

    def end_backoff_if_due(self, trainer: Trainer) -> None:
        """Restore the learning rate when the backoff is over."""
        if self.lr_backoff.end_if_due(trainer, self.escalation.counts.clock):
            log.info(f"Step {trainer.global_step}: the learning rate follows the schedule again")

    def roll_back(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict, *, backs_off: bool) -> None:
        """Restore a good snapshot; the data is not rewound unless `rewind_data` is set.

        Args:
            trainer: The trainer, at the end of a batch in which the optimizer has stepped.
            pl_module: The module.
            verdict: Verdict on the step that caused the rollback.
            backs_off: Whether to lower the learning rate as well.

        Raises:
            TrainingDivergedError: There is no good snapshot.
        """
        clock, from_step = self.escalation.counts.clock, trainer.global_step
        # after a drift or a second rollback, even the newest good snapshot may contain the damage
        snapshot = self.rollback.find(clock=clock, oldest=backs_off or verdict.drifts)
        if snapshot is None:
            self.stop(trainer)
        extras = self.rollback.restore(trainer, snapshot, with_random=self._rewind_data)
        self.monitor.load_state_dict(extras["monitor"])
        self.lr_backoff.reapply_after_rollback(trainer, extras["factor"])
        if backs_off:
            self.lr_backoff.start(trainer, self._lr_factor, end_step=clock + self._lr_backoff_steps)
        to_step = trainer.global_step
        forget_row(trainer)
        for listener in _find_listeners(trainer, pl_module):
            listener.on_rollback(trainer, pl_module, from_step, to_step)
        if self._rewind_data:
            get_datamodule(trainer).move_to(extras["position"])
        if self.skip_batches:
            get_datamodule(trainer).skip_batches(self.skip_batches)
        self._log_rollback(trainer, from_step, to_step, backs_off=backs_off)

    def stop(self, trainer: Trainer) -> NoReturn:
        """End the run.

        Raises:
            TrainingDivergedError: Always.
        """
        counts = self.escalation.counts
        why = "the loss has gone wrong and there is no good state to roll back to yet"
        if counts.non_finite_in_row:
            why = f"loss or gradient were NaN or inf in {counts.non_finite_in_row} steps in a row, all skipped"
        elif counts.recent_rollbacks > 1:
            why = f"{counts.recent_rollbacks - 1} rollbacks in a row did not help"
        step = trainer.global_step
        log_event(trainer, None, "stop", step, why=why)
        raise TrainingDivergedError(f"Diverged at step {step}: {why}")

    def _log_rollback(self, trainer: Trainer, from_step: int, to_step: int, *, backs_off: bool) -> None:
        skipped = f", {self.skip_batches} batches skipped" if self.skip_batches else ""
        line = f"Step {from_step}: rolled back to step {to_step}{skipped}"
        position = getattr(get_datamodule(trainer), "position", None)  # from which `mode=replay` counts later steps
        fields: dict[str, Any] = {"from": from_step, "skipped_batches": self.skip_batches, "position": position}
        log_event(trainer, line, "rollback", to_step, **fields)
        if backs_off:
            factor, steps = self.lr_backoff.factor, self._lr_backoff_steps
            line = f"Step {to_step}: learning rate multiplied by {factor:g} for {steps} steps"
            log_event(trainer, line, "lr_backoff", to_step, factor=factor, steps=steps)


def _check_choices(**typed: str) -> None:
    for name, value in typed.items():
        if value not in _CHOICES[name]:
            raise ValueError(f"{name}={value}: there is no such choice; type {' or '.join(_CHOICES[name])}")


def _check_counts(counts: Sequence[int]) -> None:
    for (name, smallest), value in zip(_SMALLEST.items(), counts, strict=True):
        if value < smallest:
            raise ValueError(f"{name}={value}: it is a number of steps or snapshots; type {smallest} or more")


def log_verdict(trainer: Trainer, verdict: Verdict, response: Response, *, is_repeated: bool = False) -> None:
    """Log a step's alarms and skip as console lines and events; a repeated harmless alarm only as an event."""
    step = verdict.measurement.step
    for series, alarm in verdict.alarms.items():
        line = f"Step {step}: {_SERIES_NAMES[series]} {alarm.value:.4g}"
        if alarm.kind == "drift":
            line = f"Step {step}: the {_SERIES_NAMES[series]} has risen to {alarm.value:.4g}"
        if not math.isnan(alarm.expected):
            line += f", expected {alarm.expected:.4g}"
        if math.isfinite(alarm.score):
            line += f", {alarm.score:.0f} standard deviations above"
        if verdict.is_harmless:
            line += "; its gradients are finite, so the step is applied, and such steps in a row are not reported again"
        fields = {"value": alarm.value, "expected": alarm.expected, "score": alarm.score}
        values = {name: finite(value) for name, value in fields.items()}
        log_event(trainer, None if is_repeated else line, "spike", step, series=series, kind=alarm.kind, **values)
    if verdict.skipped:
        line = f"Step {step}: skipped; weights, buffers and optimizer state are as before"
        log_event(trainer, line if response == "skip" else None, "skip", step)
    if response == "relearn":
        line = f"Step {step}: too many alarms; treating the current level as normal from now on"
        log_event(trainer, line, "relearn", step)


def log_advice(trainer: Trainer, verdict: Verdict) -> None:
    """Log once what the other actions would have done about an outlier that was applied."""
    if trainer.is_global_zero:
        log.warning(
            f"Step {verdict.measurement.step}: the update was applied, as every finite one is with action=warn;"
            " action=skip would have skipped it, and action=repair would roll back if the loss stays high"
        )


def get_datamodule(trainer: Trainer) -> Any:
    """Return the LightningDataModule; None if the run has none."""
    return getattr(trainer, "datamodule", None)


def _find_listeners(trainer: Trainer, pl_module: LightningModule) -> Iterator[Any]:
    candidates = [*get_callbacks(trainer), *trainer.loggers, pl_module, get_datamodule(trainer)]
    return (candidate for candidate in candidates if hasattr(candidate, "on_rollback"))


# Temporarily scale the learning rate of every parameter group, with any LR scheduler.

_LR_KEYS = {"lr", "initial_lr", "max_lr", "min_lr"}  # param group keys that torch.optim.lr_scheduler reads


class LearningRateBackoff:
    """Scales learning rates, including the schedulers' `base_lrs`, until a given step.

    Attributes:
        factor: Current multiplier; 1.0 without a backoff.
        end_step: Step at which the backoff ends, as counted by the caller.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self.end_step = 0
        self._base_lrs: list[list[float]] = []  # base_lrs of the schedulers, factor included

    def start(self, trainer: Trainer, factor: float, *, end_step: int) -> None:
        """Multiply the learning rates, on top of the current factor.

        Args:
            trainer: The trainer whose optimizers and schedulers are scaled.
            factor: Multiplier of every learning rate.
            end_step: Step at which the backoff ends, in a count that never decreases, not even at a rollback.
        """
        self.factor *= factor
        self.end_step = end_step
        self._scale(trainer, factor)

    def end_if_due(self, trainer: Trainer, step: int) -> bool:
        """Undo the scaling if the backoff is over; return whether it ended now."""
        if self.factor == 1.0 or step < self.end_step:
            return False
        factor, self.factor = self.factor, 1.0
        self._scale(trainer, 1.0 / factor)
        return True

    def reapply_after_rollback(self, trainer: Trainer, snapshot_factor: float) -> None:
        """Reapply the current factor after a rollback has reset the learning rates to those of the snapshot.

        Args:
            trainer: The trainer whose optimizers and schedulers are scaled.
            snapshot_factor: Value of `factor` when the snapshot was taken.
        """
        self._scale(trainer, self.factor / snapshot_factor)

    def reapply_after_resume(self, trainer: Trainer) -> None:
        """Reapply the factor after a resume, once optimizers and schedulers are restored.

        Some schedulers restore `base_lrs` that already contain the factor; others compute them from the config.
        """
        if self.factor != 1.0 and _get_base_lrs(trainer) != self._base_lrs:
            self._scale(trainer, self.factor)

    def state_dict(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {"factor": self.factor, "end_step": self.end_step, "base_lrs": self._base_lrs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`; call `reapply_after_resume` to scale the learning rates."""
        self.factor, self.end_step = state["factor"], state["end_step"]
        self._base_lrs = state["base_lrs"]

    def _scale(self, trainer: Trainer, factor: float) -> None:
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                for key in _LR_KEYS & group.keys():
                    group[key] *= factor
        for scheduler in _get_schedulers(trainer):
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs = [base * factor for base in scheduler.base_lrs]
        self._base_lrs = _get_base_lrs(trainer)


def _get_base_lrs(trainer: Trainer) -> list[list[float]]:
    return [[float(base) for base in getattr(scheduler, "base_lrs", [])] for scheduler in _get_schedulers(trainer)]


def _get_schedulers(trainer: Trainer) -> list[Any]:
    """Return all schedulers, including those nested in SequentialLR and ChainedScheduler."""
    schedulers: list[Any] = [config.scheduler for config in trainer.lr_scheduler_configs]
    for scheduler in schedulers:  # extended during the iteration
        schedulers += getattr(scheduler, "_schedulers", [])
    return schedulers
