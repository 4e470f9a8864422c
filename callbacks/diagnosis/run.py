"""A run's curves by role, independent of column names, together with its settings."""

import fnmatch
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from .curve import Curve

_MISSING = object()
STATUS_OF_EVENT = {"end": "finished", "stop": "stopped", "preempted": "preempted"}

Points = Mapping[str, Sequence[tuple[int, float]]]  # by column

# Column names for each role, separated by spaces; the first that exists is used. Lower case; `*` matches anything.
_COLUMNS = {
    "loss": "train/loss train/loss_step train_loss train_loss_step loss loss_step training_loss train/loss_epoch"
    " train_loss_epoch loss/train",
    "val_loss": "val/loss val_loss val/loss_epoch val_loss_epoch valid_loss valid/loss validation_loss validation/loss"
    " eval/loss eval_loss loss/val loss/valid",
    "learning_rate": "lr learning_rate train/lr train/learning_rate lr-* lr/*",
    "grad_norm": "grad/norm grad_norm train/grad_norm gradient_norm grad_norm_step grad_*_norm_total",
    "clipped_fraction": "grad/clipped_fraction",
    "clip_threshold": "grad/clip_threshold",
    "speed": "throughput/tokens_per_second throughput/samples_per_second tokens_per_second tokens_per_sec tokens/s"
    " samples_per_second samples_per_sec *device/items_per_sec *device/samples_per_sec",
    "step_seconds": "time/step_seconds step_seconds step_time iter_time batch_time",
    "data_wait": "time/data_wait_fraction data_wait_fraction",
    "loss_scale": "precision/loss_scale loss_scale grad_scale scaler/scale",
    "overflow_steps": "precision/overflow_steps overflow_steps",
    "skipped_steps": "spike/skipped_steps",
    "rollbacks": "spike/rollbacks",
    "memory": "memory/host_peak_gib",
    "device_memory": "memory/allocated_peak_gib",
    "epoch": "epoch trainer/epoch train/epoch",
    "samples": "train/samples",
    "chosen_log_prob": "train/chosen_log_prob logps/chosen train/logps/chosen",
    "margin": "train/margin rewards/margins train/rewards/margins",
    "reward": "reward/mean reward train/reward",
    "no_spread": "reward/no_spread_fraction frac_reward_zero_std train/frac_reward_zero_std",
    "reward_errors": "reward/errors",
    "completion_tokens": "rollout/tokens_mean completions/mean_length train/completions/mean_length",
    "truncated": "rollout/truncated_fraction completions/clipped_ratio train/completions/clipped_ratio",
    "entropy": "policy/entropy entropy train/entropy",
    "clipped_tokens": "policy/clipped_fraction clip_ratio/region_mean train/clip_ratio/region_mean",
    "logprob_gap": "rollout/logprob_gap sampling/sampling_logp_difference/mean",
    "val_reward": "val/reward eval_reward eval/reward",
    "val_exact_match": "val/exact_match",
}
ROLES = {role: tuple(columns.split()) for role, columns in _COLUMNS.items()}
DESCRIBED = {
    "loss": "training loss",
    "val_loss": "validation loss",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "clipped_fraction": "fraction of clipped steps",
    "speed": "speed",
    "data_wait": "time waited for data",
    "loss_scale": "loss scale",
    "memory": "memory",
    "epoch": "epoch",
    "reward": "reward of completions",
    "no_spread": "groups without spread",
    "reward_errors": "failures of reward functions",
    "completion_tokens": "length of completions",
    "truncated": "completions without an end",
    "entropy": "entropy",
    "clipped_tokens": "clipped ratios",
    "logprob_gap": "gap between sampler and model",
    "val_reward": "held-out reward",
    "val_exact_match": "held-out exact match",
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """Curves, settings and events of a run.

    Attributes:
        curves: Curves by role; metrics that were not logged are absent.
        folder: The run's folder.
        config: Its settings; empty if unknown.
        status: Final status; None if unknown.
        events: Event records in order of steps.
        epoch_starts: First step of every epoch after the first; empty if unknown.
        notes: Irregularities in its files, one sentence each.
    """

    curves: Mapping[str, Curve]
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    status: str | None = None
    events: Sequence[Mapping[str, Any]] = ()
    epoch_starts: Sequence[int] = ()
    notes: Sequence[str] = ()

    @property
    def is_recipe(self) -> bool:
        """Whether train.py wrote the run, so that its overrides are known."""
        return isinstance(self.config.get("mode"), Mapping) and "trainer" in self.config

    @property
    def first_step(self) -> int:
        """First step of any curve."""
        return min(curve.steps[0] for curve in self.curves.values())

    @property
    def last_step(self) -> int:
        """Last step of any curve."""
        return max(curve.steps[-1] for curve in self.curves.values())

    @property
    def learns_from_rewards(self) -> bool:
        """Whether it is a policy's: its loss has both signs and lies around 0, whatever is learned."""
        return "reward" in self.curves

    @property
    def num_classes(self) -> int | None:
        """Vocabulary size or number of classes, from the config."""
        for key in ("model.vocab_size", "model.num_classes", "vocab_size", "num_classes"):
            value = self.number(key)
            if value is not None and value >= 2:
                return int(value)
        return None

    def number(self, key: str) -> float | None:
        """Return a numeric setting by its dotted name; None if it is missing or is text."""
        value = self._find(key)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def has(self, key: str) -> bool:
        """Return whether a setting or section of this dotted name is there and not null."""
        return self._find(key) not in (None, _MISSING)

    @property
    def resume(self) -> str:
        """Return the override that resumes this run, as it is typed in a shell."""
        return shlex.quote(f"resume={self.folder}")

    def suggest(self, override: str | None, plain: str) -> str:
        """Return the override for a run of train.py, else the plain description.

        Args:
            override: Overrides; None if the run has no such setting.
            plain: Description for other projects.
        """
        return override if self.is_recipe and override is not None else plain

    def setting(self, key: str, value: object) -> str | None:
        """Return an override for an existing setting; None if the run does not have it."""
        return f"{key}={value}" if self._find(key) is not _MISSING else None

    def scaled_override(self, key: str, factor: float, *, at_least: float = 0.0) -> str | None:
        """Return an override that scales a setting, keeping integers; None if it is not a positive number."""
        value = self.number(key)
        if value is None or not value * factor > 0:
            return None
        product = max(value * factor, at_least)
        return f"{key}={round(product)}" if isinstance(self._find(key), int) else f"{key}={product:.3g}"

    def _find(self, key: str) -> Any:
        node: Any = self.config
        for name in key.split("."):
            if not isinstance(node, Mapping) or name not in node:
                return _MISSING
            node = node[name]
        return node


def make_run(
    points: Points,
    *,
    folder: Path,
    config: Mapping[str, Any] | None = None,
    status: str | None = None,
    events: Sequence[Mapping[str, Any]] = (),
    steps_per_epoch: float | None = None,
    notes: Sequence[str] = (),
) -> Run:
    """Build a run from columns, assigning roles by column name.

    Args:
        points: Steps and values of each column, in order of steps.
        folder: The run's folder, for commands that name it.
        config: Its settings.
        status: Final status; None infers it from the last event.
        events: Event records.
        steps_per_epoch: Optimizer steps per epoch; None infers them from the epoch column or the number of samples.
        notes: Irregularities in its files.
    """
    curves = {role: curve for role in ROLES if (curve := _find_curve(points, ROLES[role])) is not None}
    run = Run(curves=curves, folder=folder, config=config or {}, events=events, notes=notes)
    if status is None and events:
        status = STATUS_OF_EVENT.get(str(events[-1].get("event")))
    return replace(run, status=status, epoch_starts=_find_epoch_starts(run, steps_per_epoch))


def _find_curve(points: Points, patterns: Sequence[str]) -> Curve | None:
    for pattern in patterns:
        for name, column in points.items():
            if column and _matches(name.lower(), pattern):
                rows = sorted(dict(column).items())  # keep the last row of a repeated step
                return Curve(name, [step for step, _ in rows], [value for _, value in rows])
    return None


def _matches(name: str, pattern: str) -> bool:
    if "*" in pattern:
        return fnmatch.fnmatchcase(name, pattern)
    # `Training Loss` of a notebook; TensorBoard writes the tag `train/loss` as train_loss in names of files
    return name == pattern or re.sub("[ /-]", "_", name) == pattern.replace("/", "_")


def _find_epoch_starts(run: Run, steps_per_epoch: float | None) -> list[int]:
    """Return the first step of every epoch except the first."""
    loss = run.curves.get("loss")
    if loss is None:
        return []
    epochs = run.curves.get("epoch")
    if steps_per_epoch is None and epochs is not None:
        values = epochs.finite
        pairs = zip(values.steps, values.values, values.values[1:], values.steps[1:], strict=False)
        return [after for _, epoch, following, after in pairs if int(following) > int(epoch)]
    steps_per_epoch = steps_per_epoch or _count_steps_per_epoch(run)
    if not steps_per_epoch:
        return []
    first = loss.steps[0]  # 0 in Lightning's own logger, 1 in ours
    count = int((loss.steps[-1] - first) / steps_per_epoch)
    return [first + round(number * steps_per_epoch) for number in range(1, count + 1)]


def _count_steps_per_epoch(run: Run) -> float | None:
    """Return the data set's samples divided by the samples per step; None if either is unknown."""
    size, consumed = run.number("data.num_samples"), run.curves.get("samples")
    if size is None or consumed is None or len(consumed) < 3:
        return None
    points = list(zip(consumed.steps, consumed.values, strict=True))
    rates = [(w - v) / (t - s) for (s, v), (t, w) in pairwise(points) if t > s]
    return size / median(rates) if rates and median(rates) > 0 else None
