"""What is done about a run that has gone wrong: back to a good state, past the data, with a smaller rate, or an end."""

import logging
from collections.abc import Iterator
from typing import Any, Literal, NoReturn

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from ..events import log_event
from .escalation import SpikeEscalation
from .lr_backoff import LearningRateBackoff
from .monitor import SpikeMonitor, Verdict
from .rollback import Rollback

log = logging.getLogger("lightning_recipes")


class TrainingDivergedError(RuntimeError):
    """Recovery is exhausted.

    Attributes:
        exit_code: What the process should end with.
    """

    exit_code = 3


class Recovery:
    """Carries out what the ladder decides.

    Args:
        watch: Goes back with the run: it forgets what is undone.
        max_skips: One more skipped step within `quarantine_steps`, and the run goes back.
        snapshot_every: Optimizer steps between snapshots.
        num_snapshots: How many are kept, each of the size of weights and optimizer state.
        quarantine_steps: A snapshot is good when so many steps have followed it.
        snapshot_storage: `memory`, `disk` or `auto`: memory where they fit.
        skip_batches: Optimizer steps' worth of data passed over after a rollback.
        cooldown_steps: A rollback within so many steps of another is one more in a row.
        lr_factor: Of the learning rates, from the second rollback in a row on.
        lr_backoff_steps: For so many steps.
        max_rollbacks: So many in a row, and the run stops.
        rewind_data: Whether the data goes back too: it has a `position` and `move_to(position)`.

    Raises:
        ValueError: Every snapshot is overwritten before it is good.
    """

    def __init__(
        self,
        *,
        watch: SpikeMonitor,
        max_skips: int,
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
        longest = snapshot_every * (num_snapshots - 1)
        if quarantine_steps > longest:
            raise ValueError(
                f"num_snapshots={num_snapshots} every {snapshot_every} steps: each is overwritten before its"
                f" quarantine of {quarantine_steps} steps is over; type quarantine_steps={longest}"
            )
        self.cut = LearningRateBackoff()
        self.ladder = SpikeEscalation(
            max_skips=max_skips,
            skip_window=quarantine_steps,
            cooldown_steps=cooldown_steps,
            max_rollbacks=max_rollbacks,
        )
        self.rollback = Rollback(
            num_snapshots=num_snapshots,
            quarantine_steps=quarantine_steps,
            snapshot_storage=snapshot_storage,
        )
        self._watch = watch
        self._skip_batches = skip_batches
        self._lr_factor = lr_factor
        self._lr_backoff_steps = lr_backoff_steps
        self._rewind_data = rewind_data

    def take_snapshot(self, trainer: Trainer, *, is_good: bool = False) -> None:
        """Of now.

        Args:
            trainer: At the end of a batch in which the optimizer has stepped.
            is_good: Whether it needs no quarantine.
        """
        self.rollback.take(
            trainer,
            clock=self.ladder.counts.clock,
            is_good=is_good,
            watch=self._watch.state_dict(),
            factor=self.cut.factor,
            position=data_of(trainer).position if self._rewind_data else None,
        )

    def end_cut_if_due(self, trainer: Trainer) -> None:
        """Give the learning rate back when its time is over."""
        if self.cut.end_if_due(trainer, self.ladder.counts.clock):
            log.info(f"Step {trainer.global_step}: the learning rate is that of the schedule again")

    def go_back(
        self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict, *, cuts: bool
    ) -> None:
        """To a good state; the data goes on.

        Args:
            trainer: At the end of a batch in which the optimizer has stepped.
            pl_module: The module.
            verdict: Of the step that led to it.
            cuts: Whether the learning rate is cut too.

        Raises:
            TrainingDivergedError: There is no good state.
        """
        clock, from_step = self.ladder.counts.clock, trainer.global_step
        snapshot = self.rollback.find(clock=clock, furthest=cuts or verdict.drifts)
        if snapshot is None:
            self.stop(trainer)
        beside = self.rollback.go_back(trainer, snapshot)
        self._watch.load_state_dict(beside["watch"])
        self.cut.put_back(trainer, beside["factor"])
        if cuts:
            self.cut.cut(trainer, self._lr_factor, until=clock + self._lr_backoff_steps)
        to_step = trainer.global_step
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(
                callback, ModelCheckpoint
            ):  # else it takes the step made again for one it has saved
                callback._last_global_step_saved = min(callback._last_global_step_saved, to_step)
        for listener in _listeners(trainer, pl_module):
            listener.on_rollback(trainer, pl_module, from_step, to_step)
        if self._rewind_data:
            data_of(trainer).move_to(beside["position"])
        if self._skip_batches:
            data_of(trainer).skip_batches(self._skip_batches)
        self._tell(trainer, from_step, to_step, cuts=cuts)

    def stop(self, trainer: Trainer) -> NoReturn:
        """End the run.

        Raises:
            TrainingDivergedError: Always.
        """
        counts = self.ladder.counts
        why = "the loss goes wrong and there is no good state to go back to yet"
        if counts.recent_rollbacks > 1:
            why = f"{counts.recent_rollbacks - 1} rollbacks one after the other did not help"
        step = trainer.global_step
        log_event(trainer, None, "stop", step, why=why)
        raise TrainingDivergedError(f"Diverged at step {step}: {why}")

    def _tell(self, trainer: Trainer, from_step: int, to_step: int, *, cuts: bool) -> None:
        past = f", {self._skip_batches} batches passed over" if self._skip_batches else ""
        line = f"Step {from_step}: went back to step {to_step}{past}"
        fields: dict[str, Any] = {"from": from_step, "skipped_batches": self._skip_batches}
        log_event(trainer, line, "rollback", to_step, **fields)
        if cuts:
            factor, steps = self.cut.factor, self._lr_backoff_steps
            line = f"Step {to_step}: the learning rate times {factor:g} for {steps} steps"
            log_event(trainer, line, "lr_backoff", to_step, factor=factor, steps=steps)


def data_of(trainer: Trainer) -> Any:
    """The LightningDataModule; None where there is none."""
    return getattr(trainer, "datamodule", None)


def _listeners(trainer: Trainer, pl_module: LightningModule) -> Iterator[Any]:
    everyone = [*trainer.callbacks, *trainer.loggers, pl_module, data_of(trainer)]  # type: ignore[attr-defined]
    return (one for one in everyone if hasattr(one, "on_rollback"))
