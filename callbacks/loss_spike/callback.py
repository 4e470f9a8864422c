"""A step out of line is skipped, a run that has gone wrong goes back to a good state: loss and norm of every step.

Costs a sum over the ranks and 50 us a step, and a copy of the state in host memory every so many steps.
"""

import logging
from typing import Annotated, Any, Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from ..logged_step import StepCounter, is_logged_step, log_row
from ..profiler_hooks import get_profiler
from .dump import SpikeDump
from .escalation import Response
from .monitor import SpikeMonitor, Verdict
from .reader import StepReader
from .recovery import Recovery, data_of
from .train_state import is_reachable
from .verdict_log import log_verdict

log = logging.getLogger("lightning_recipes")
_LARGEST_SCORE = 1e6  # in a row: a curve cannot show infinity


class LossSpikeRollback(Callback):
    """Skip the step, go back and past the bad data, halve the learning rate, stop: in this order, and counted.

    Before a step is made its loss over all ranks and its gradient norm are compared with the recent ones; one that
    is out of line, or no finite number, is refused, and the moments stay clean. Too many of these in a row, or a
    loss that has risen for long, and the run goes back to a snapshot that has been followed by quiet steps. The data
    goes on where it was, and `skip_batches` further. A second time soon after, the learning rate is cut for a while;
    when that does not help either, the run stops with `TrainingDivergedError`.

    Works in any Lightning project on one device, DDP and FSDP2. For other engines the strategy answers
    `live_tensors`. Whoever has `on_rollback(trainer, pl_module, from_step, to_step)`, a callback, a logger, the module
    or the data module, hears of one.

    Args:
        window, warmup_steps, loss_threshold, norm_threshold, drift_threshold: See `SpikeMonitor`.
        max_skips, snapshot_every, num_snapshots, quarantine_steps, snapshot_storage: See `Recovery`.
        skip_batches, lr_factor, lr_backoff_steps, cooldown_steps, max_rollbacks: See `Recovery`.
        max_dumps: So many spikes leave a folder `spikes/step_N`; later ones a line and an event.
        rewind_data: Whether the data goes back too, as tests want it; the run then meets the same samples again.
    """

    def __init__(
        self,
        *,
        window: Annotated[int, ">= 2"] = 128,
        warmup_steps: Annotated[int, ">= 2"] = 64,
        loss_threshold: Annotated[float, "> 0"] = 8.0,
        norm_threshold: Annotated[float, "> 0"] = 16.0,
        drift_threshold: Annotated[float, "> 0"] | None = 1.75,
        max_skips: Annotated[int, ">= 0"] = 3,
        snapshot_every: Annotated[int, ">= 1"] = 50,
        num_snapshots: Annotated[int, ">= 2"] = 2,
        quarantine_steps: Annotated[int, ">= 1"] = 50,
        snapshot_storage: Literal["auto", "memory", "disk"] = "auto",
        skip_batches: Annotated[int, ">= 0"] = 0,
        lr_factor: Annotated[float, "> 0, < 1"] = 0.5,
        lr_backoff_steps: Annotated[int, ">= 1"] = 200,
        cooldown_steps: Annotated[int, ">= 1"] = 200,
        max_rollbacks: Annotated[int, ">= 1"] = 5,
        max_dumps: Annotated[int, ">= 0"] = 3,
        rewind_data: bool = False,
    ) -> None:
        self._watch = SpikeMonitor(
            window=window,
            warmup_steps=warmup_steps,
            loss_threshold=loss_threshold,
            norm_threshold=norm_threshold,
            drift_threshold=drift_threshold,
        )
        self._recovery = Recovery(
            watch=self._watch,
            max_skips=max_skips,
            snapshot_every=snapshot_every,
            num_snapshots=num_snapshots,
            quarantine_steps=quarantine_steps,
            snapshot_storage=snapshot_storage,
            skip_batches=skip_batches,
            cooldown_steps=cooldown_steps,
            lr_factor=lr_factor,
            lr_backoff_steps=lr_backoff_steps,
            max_rollbacks=max_rollbacks,
            rewind_data=rewind_data,
        )
        self._evidence = SpikeDump(max_folders=max_dumps)
        self._snapshot_every = snapshot_every
        self._skip_batches = skip_batches
        self._steps = StepCounter()
        self._reader: StepReader | None = None  # while training, where there is something to guard
        self._verdict: Verdict | None = None  # of the newest step that has been read
        self._response: Response = "none"
        self._has_begun = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not is_reachable(trainer):
            raise MisconfigurationException(
                f"LossSpikeRollback cannot reach the optimizer state of {type(trainer.strategy).__name__}: use one"
                " device, DDP or FSDP2, or a strategy that answers live_tensors()"
            )
        if self._skip_batches and not hasattr(data_of(trainer), "skip_batches"):
            raise MisconfigurationException(
                f"LossSpikeRollback(skip_batches={self._skip_batches}): the data has no position to move, which would"
                " be a LightningDataModule with skip_batches(n); type skip_batches=0: the run then goes on behind"
                " what it has read"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps.start(trainer)
        self._verdict, self._response, self._has_begun = None, "none", False
        self._reader = None
        if pl_module.automatic_optimization:
            self._reader = StepReader(self._watch, trainer, pl_module)
        elif trainer.is_global_zero:
            log.warning("LossSpikeRollback is off: the module steps its optimizers by hand")

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._reader is None:
            return
        self._evidence.note(trainer, batch)
        self._reader.begin_batch(pl_module)
        if self._has_begun:
            return
        self._has_begun = True
        self._recovery.cut.apply(trainer)  # modules set up their schedules after `on_train_start`
        if trainer.global_step:  # a checkpoint is a state that has been proven
            self._recovery.take_snapshot(trainer, is_good=True)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        if self._reader is not None:
            self._reader.add_loss(trainer, loss)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        if self._reader is not None:
            self._recovery.rollback.wait_until_copied()
            self._reader.guard_step(trainer, optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._reader is None or not self._steps.stepped(trainer):
            return
        self._verdict = self._reader.read(trainer)
        self._response = "none"
        if self._verdict is not None:
            self._response = self._recovery.ladder.step(
                refused=self._verdict.refused, drifts=self._verdict.drifts
            )
            self._reader.set_limits()
        if is_logged_step(trainer):
            log_row(pl_module, self._row())
        if not getattr(
            pl_module, "writes_rows", False
        ):  # else whoever writes the row calls, when it is written
            self.after_row(trainer, pl_module)

    def after_row(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The step is told; now do about it what there is to do."""
        verdict, self._verdict = self._verdict, None
        clock = self._recovery.ladder.counts.clock
        if verdict is None or self._reader is None:
            return
        log_verdict(trainer, verdict, self._response)
        is_first = len(self._recovery.ladder.counts.recent_skips) == 1
        if verdict.alarms and (is_first or self._response not in ("none", "skip")):
            with get_profiler(trainer).profile(
                "spike"
            ):  # heard by SpeedMonitor, which leaves it out
                self._evidence.write(trainer, pl_module, verdict, self._watch)
        if self._response == "stop":
            self._recovery.stop(trainer)
        if self._response in ("rollback", "rollback_and_cut"):
            cuts = self._response == "rollback_and_cut"
            with get_profiler(trainer).profile("spike"):
                self._recovery.go_back(trainer, pl_module, verdict, cuts=cuts)
            self._reader.go_back()
            self._evidence.forget()
            self._steps.start(trainer)
            return
        self._recovery.end_cut_if_due(trainer)
        is_first = clock == 1  # nothing has had the time to go wrong
        due = is_first or trainer.global_step % self._snapshot_every == 0
        if due and self._recovery.ladder.is_quiet:
            self._recovery.take_snapshot(trainer, is_good=is_first)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        last = None if self._reader is None else self._reader.read_last(trainer)
        if last is not None:
            self._recovery.ladder.step(refused=last.refused, drifts=False)
            log_verdict(trainer, last, "skip")
        self._recovery.rollback.drop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._recovery.rollback.drop()

    def _row(self) -> dict[str, float]:
        counts = self._recovery.ladder.counts
        score = 0.0 if self._verdict is None else self._verdict.score
        return {
            "spike/score": min(score, _LARGEST_SCORE),
            "spike/skipped_steps": counts.skipped_steps,
            "spike/rollbacks": counts.rollbacks,
        }

    def summary(self) -> dict[str, int]:
        """What was done about spikes."""
        counts = self._recovery.ladder.counts
        return {"rollbacks": counts.rollbacks, "skipped_steps": counts.skipped_steps}

    def state_dict(self) -> dict[str, Any]:
        return {
            "watch": self._watch.state_dict(),
            "ladder": self._recovery.ladder.state_dict(),
            "cut": self._recovery.cut.state_dict(),
            "num_evidence": self._evidence.num_folders,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._watch.load_state_dict(state_dict["watch"])
        self._recovery.ladder.load_state_dict(state_dict["ladder"])
        self._recovery.cut.load_state_dict(state_dict["cut"])
        self._evidence.num_folders = state_dict["num_evidence"]
