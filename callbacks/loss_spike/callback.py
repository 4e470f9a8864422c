"""Check loss and gradient norm at every step, skip bad updates, and roll a damaged run back to a good state.

Costs an all-reduce and 50 us per step, a copy of the buffers that forward passes change, and a copy of the train state
to host memory every `snapshot_every` steps. On a GPU, it also synchronizes once per step, before the optimizer step,
unless the module is a `SupportsStepGuard`.
"""

import logging
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ..events import EventKind
from ..lightning_internals import call_after_row
from ..lightning_packages import Callback
from ..logged_step import StepCounter, is_logged_step, log_row
from ..profiler_hooks import get_profiler
from ..protocols import SupportsRow
from .dump import SpikeDump
from .escalation import Response
from .monitor import SpikeMonitor, Verdict
from .reader import StepReader, why_not_guarded
from .recovery import Recovery, get_datamodule, log_advice, log_verdict
from .train_state import is_reachable

log = logging.getLogger("lightning_recipes")
_LARGEST_SCORE = 1e6  # logged for an infinite score, which a curve cannot show


class LossSpikeRollback(Callback):
    """Skips NaN and inf steps and warns about spikes; can also skip spikes, roll back and lower the learning rate.

    Useful in long unattended runs, which a single bad batch or bit flip can ruin. Before each optimizer step, its loss
    over all ranks and its gradient norm are compared with recent values. A step with NaN or inf is skipped: weights and
    optimizer state are left unchanged. (If all gradients are finite when the optimizer steps, because the module or
    clipping has replaced NaN, the step is applied.) With `action="skip"`, outliers are skipped as well. With
    `action="rollback"`, too many outliers within a window, or a loss that drifts upward, roll the run back to a
    snapshot whose quarantine has passed; a second rollback within the cooldown also lowers the learning rate
    temporarily, and after `max_rollbacks` in a row the run stops. Logs `spike/score`, `spike/skipped_steps` and
    `spike/rollbacks`.

    By default, finite outliers are applied with a warning, since a bad batch looks like a loss term being switched on.
    The default `min_rise` also requires them to be far above everything seen in the run, so that hard batches, warm
    restarts or a change of augmentation do not warn. `action="repair"` applies them as well, but rolls back if the loss
    stays up: if the median of 16 steps is twice as far above the median of the window before them as any loss in it. If
    the loss is as high within 16 steps of a rollback, the data or the objective has changed, and the run goes on from
    there. `action="skip"` suits a loss of constant scale. For language model pre-training, `action="rollback"`,
    `min_rise=0` and `drift_threshold=1.75` also catch slow divergence and damage at losses below the initial ones.

    The loss of a module that is a `SupportsCompletions` lies around 0 whatever it learns: of it, NaN and inf alone are
    found, while its gradient norm is compared as always.

    With a loss scaler (`16-mixed`), a step that overflows is the scaler's matter: it counts neither as an outlier nor
    towards `max_non_finite` while the scaler lowers its scale, down to 2**-24.

    A rollback restores weights, persistent buffers, optimizer state, LR schedulers stepped per optimizer step, the loss
    scale, and the state of Lightning's `WeightAveraging`, `EarlyStopping` and `ModelCheckpoint`. It does not restore
    the data order, RNG states, LR schedulers stepped per epoch, or metrics and other attributes that the module
    accumulates. Works on one device, DDP and FSDP2 in any Lightning project; any other strategy must provide
    `live_tensors`. Every rollback calls `on_rollback(trainer, pl_module, from_step, to_step)` on callbacks, loggers,
    module and data module if they define it.

    Args:
        action: Strongest response to outliers: `warn` logs; `skip` skips the update; `repair` applies it, and rolls
            back if the loss stays up; `rollback` skips and rolls back.
        window: Recent normal steps that each step is compared with.
        warmup_steps: Steps before spikes can be detected; NaN and inf are detected from the first step.
        loss_threshold: Robust standard deviations above the median at which a loss is a spike.
        norm_threshold: The same for the logarithm of the gradient norm, which is heavy-tailed in healthy runs.
        drift_threshold: The same for the half-window median above its lowest value so far; None disables it.
        min_rise: Also require this multiple of the largest rise of a normal step so far; 0 requires no such rise.
        max_skips: Outliers tolerated within `quarantine_steps`; the next one rolls back, or relearns the normal level.
            Not used by `repair`.
        max_non_finite: Consecutive skipped NaN or inf steps tolerated; the next one rolls back, or stops the run.
        snapshot_every: Optimizer steps between snapshots.
        num_snapshots: Snapshots held, each the size of the weights plus optimizer state.
        quarantine_steps: Optimizer steps without a spike after which a snapshot is good.
        snapshot_storage: `memory` (host), `disk` (run folder), or `auto`: memory if the snapshots fit.
        skip_batches: Optimizer steps' worth of data to skip after a rollback; needs a data module with `skip_batches`.
        lr_factor: Multiplier for the learning rates, from the second consecutive rollback on.
        lr_backoff_steps: Optimizer steps for which `lr_factor` applies.
        cooldown_steps: Rollbacks at most this many optimizer steps apart count as consecutive.
        max_rollbacks: Consecutive rollbacks before the run stops.
        max_dumps: Maximum debug dumps (`spikes/step_N`) per run; later spikes are only logged.
        rewind_data: Also rewind the data on a rollback, so that the run repeats the same samples; for tests.

    Raises:
        ValueError: Settings conflict or are out of range; see `SpikeDetector`, `SpikeEscalation` and `Recovery`.
        MisconfigurationException: At setup, if the strategy does not expose its optimizer state or the data cannot
            skip batches; at the first snapshot, if it does not fit into memory.
        TrainingDivergedError: During training, if recovery has failed.

    Example:
        >>> spikes = LossSpikeRollback(snapshot_every=100, quarantine_steps=100)
        >>> trainer = Trainer(callbacks=[spikes], accelerator="cpu", logger=False)
        >>> spikes.summary()
        {'rollbacks': 0, 'skipped_steps': 0}
    """

    summary_fields: ClassVar[dict[str, Any]] = {"rollbacks": 0, "skipped_steps": 0}
    summed_fields: ClassVar[frozenset[str]] = frozenset({"skipped_steps"})
    events: ClassVar[dict[str, EventKind]] = {
        "spike": {},
        "skip": {},
        "rollback": {"mark": "span"},
        "relearn": {},
        "lr_backoff": {},
        "stop": {"kept_on_resume": True},
    }

    _reader: StepReader | None = None  # only while training with automatic optimization
    _verdict: Verdict | None = None  # for the newest step read so far
    _response: Response = "none"
    _has_begun = False
    _was_harmless = False  # whether the previous verdict was harmless
    _has_advised = False

    def __init__(
        self,
        *,
        action: Literal["warn", "skip", "repair", "rollback"] = "warn",
        window: Annotated[int, ">= 2"] = 128,
        warmup_steps: Annotated[int, ">= 2"] = 64,
        loss_threshold: Annotated[float, "> 0"] = 8.0,
        norm_threshold: Annotated[float, "> 0"] = 16.0,
        drift_threshold: Annotated[float, "> 0"] | None = None,
        min_rise: Annotated[float, ">= 0"] = 3.0,
        max_skips: Annotated[int, ">= 0"] = 3,
        max_non_finite: Annotated[int, ">= 0"] = 20,
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
        super().__init__()
        self._recovery = Recovery(
            monitor=SpikeMonitor(
                window=window,
                warmup_steps=warmup_steps,
                loss_threshold=loss_threshold,
                norm_threshold=norm_threshold,
                drift_threshold=drift_threshold,
                min_rise=min_rise,
                skips_outliers=action in ("skip", "rollback"),
                finds_levels=action == "repair",
            ),
            action=action,
            max_skips=max_skips,
            max_non_finite=max_non_finite,
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
        self._dump = SpikeDump(max_folders=max_dumps)
        self._steps = StepCounter()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if self._recovery.rolls_back and not is_reachable(trainer):
            raise MisconfigurationException(
                f"LossSpikeRollback cannot reach the optimizer state of {type(trainer.strategy).__name__}: use one"
                ' device, DDP or FSDP2, or a strategy that provides live_tensors(), or type action="skip"'
            )
        if self._recovery.skip_batches and not hasattr(get_datamodule(trainer), "skip_batches"):
            raise MisconfigurationException(
                f"LossSpikeRollback(skip_batches={self._recovery.skip_batches}): the data cannot skip, which requires a"
                " LightningDataModule with skip_batches(n); type skip_batches=0: after a rollback the run then"
                " continues with the next batch"
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps.start(trainer)
        self._verdict, self._response, self._has_begun = None, "none", False
        self._reader, why_not = None, why_not_guarded(trainer, pl_module)
        if why_not is None:
            self._reader = StepReader(self._recovery.monitor, trainer, pl_module)
        elif trainer.is_global_zero:
            log.warning(f"LossSpikeRollback is off: {why_not}")

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._reader is None:
            return
        self._dump.record(trainer, batch)
        self._reader.begin_batch(pl_module)
        if self._has_begun:
            return
        self._has_begun = True
        self._recovery.lr_backoff.reapply_after_resume(trainer)  # modules set up schedules after `on_train_start`
        if trainer.global_step and self._recovery.rolls_back:
            self._recovery.take_snapshot(trainer, is_good=True)  # state from a checkpoint needs no quarantine

    @override
    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._reader is not None:
            self._reader.end_forward()  # this hook of the module may update a moving average

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._reader is not None:
            self._reader.end_forward()  # of a micro-batch that keeps the gradients of the one before
            self._reader.add_loss(trainer, loss)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._reader is not None:
            self._recovery.rollback.wait_until_copied()
            self._reader.guard_step(trainer, optimizer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._reader is None or not self._steps.stepped(trainer):
            return
        self._verdict = self._reader.read(trainer)
        self._response = "none"
        if self._verdict is not None:
            self._response = self._recovery.count(self._verdict)
            self._reader.set_limits()
        if is_logged_step(trainer):
            log_row(pl_module, self._get_row())
        if not isinstance(pl_module, SupportsRow):  # else the code that writes the row calls after_row
            # a rollback changes the step count: later callbacks and the module still log this step under its own number
            call_after_row(trainer, partial(self.after_row, trainer, pl_module))

    def after_row(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Respond to the newest verdict, after the step's row is written: a rollback undoes that step."""
        verdict, self._verdict = self._verdict, None
        if verdict is None or self._reader is None:
            return
        log_verdict(trainer, verdict, self._response, is_repeated=verdict.is_harmless and self._was_harmless)
        self._was_harmless = verdict.is_harmless
        if self._recovery.action == "warn" and verdict.is_outlier and not self._has_advised:
            self._has_advised = True
            log_advice(trainer, verdict)
        counts = self._recovery.escalation.counts
        is_first = len(counts.recent_outliers) + counts.non_finite_in_row + counts.overflows_in_row == 1
        if verdict.alarms and (is_first or self._response not in ("none", "skip")):
            self._dump.write(trainer, pl_module, verdict, self._recovery.monitor)
        if self._response == "stop":
            self._recovery.stop(trainer)
        if self._response in ("rollback", "rollback_and_backoff"):
            backs_off = self._response == "rollback_and_backoff"
            with get_profiler(trainer).profile("spike"):  # SpeedMonitor excludes this time
                self._recovery.roll_back(trainer, pl_module, verdict, backs_off=backs_off)
            self._reader.roll_back()
            self._dump.clear()
            self._steps.start(trainer)
            return
        if self._response == "relearn":
            self._recovery.monitor.forget()
            self._reader.set_limits()
        self._recovery.end_backoff_if_due(trainer)
        # the snapshot after the first step needs no quarantine: nothing can have gone wrong yet
        is_first_step = counts.clock == 1
        is_due = is_first_step or trainer.global_step % self._recovery.snapshot_every == 0
        if is_due and self._recovery.rolls_back and self._recovery.escalation.is_quiet:
            self._recovery.take_snapshot(trainer, is_good=is_first_step)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        last = None if self._reader is None else self._reader.read_last(trainer)
        if last is not None:
            self._recovery.count(last)
            log_verdict(trainer, last, "skip")
        self._end()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end()

    def _end(self) -> None:
        if self._reader is not None:
            self._reader.end()
        self._recovery.rollback.drop()

    def _get_row(self) -> dict[str, float]:
        counts = self._recovery.escalation.counts
        score = 0.0 if self._verdict is None else self._verdict.score
        return {
            "spike/score": min(score, _LARGEST_SCORE),
            "spike/skipped_steps": counts.skipped_steps,
            "spike/rollbacks": counts.rollbacks,
        }

    def summary(self) -> dict[str, int]:
        """Return the numbers of skipped steps and rollbacks."""
        counts = self._recovery.escalation.counts
        return {"rollbacks": counts.rollbacks, "skipped_steps": counts.skipped_steps}

    @override
    def state_dict(self) -> dict[str, Any]:
        return {
            "monitor": self._recovery.monitor.state_dict(),
            "escalation": self._recovery.escalation.state_dict(),
            "lr_backoff": self._recovery.lr_backoff.state_dict(),
            "num_dumps": self._dump.num_folders,
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._recovery.monitor.load_state_dict(state_dict["monitor"])
        self._recovery.escalation.load_state_dict(state_dict["escalation"])
        self._recovery.lr_backoff.load_state_dict(state_dict["lr_backoff"])
        self._dump.num_folders = state_dict["num_dumps"]
