"""Check the first rollouts of a policy, sampled with the weights that it starts from."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as lightning
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from recipes.preflight.result import Result, judge

_NO_SPREAD = 0.9  # fraction of groups: what is left to learn from is a tenth of the completions
_TRUNCATED = 0.5  # of completions: most never say that they are done
# nats per token between sampler and model: rounding in bfloat16 makes some 0.01; a ratio of 1.05 is a quarter of the
# usual clipping before a step was taken
_GAP, _LARGE_GAP = 0.05, 0.5
_SLOW = 0.5  # of the time of a step


@dataclass(frozen=True, kw_only=True)
class FirstRollout:
    """What a rollout and the step after it logged, and the seconds that they took.

    Attributes:
        row: Metrics of the step, by name.
        rollout_seconds: Time of sampling.
        reward_seconds: Time of scoring on this rank.
        num_completions: Of this rank.
    """

    row: dict[str, float]
    rollout_seconds: float
    reward_seconds: float
    num_completions: int

    @property
    def no_spread_fraction(self) -> float:
        """Share of the groups whose completions have one reward; without groups, of the batch."""
        return self.row.get("reward/no_spread_fraction", float(self.row["reward/std"] == 0))


class RolloutProbe(Callback):
    """Keeps what the first steps of a policy logged."""

    def __init__(self) -> None:
        self.rollouts: list[FirstRollout] = []

    @override
    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        row = pl_module.recipes_row
        if "reward/mean" not in row:  # a micro-batch before the last
            return
        seconds = pl_module.rollout_seconds
        self.rollouts.append(
            FirstRollout(
                row={name: float(value) for name, value in row.items()},
                rollout_seconds=seconds["rollout"],
                reward_seconds=seconds["reward"],
                num_completions=len(batch["targets"]) * trainer.accumulate_grad_batches,
            )
        )


def check_rollouts(probe: RolloutProbe) -> Iterator[Result]:
    """Yield the results of all checks of the first rollouts."""
    first = probe.rollouts[0].row
    count = len(probe.rollouts)
    none = sum(each.no_spread_fraction for each in probe.rollouts) / count
    mean = sum(each.row["reward/mean"] for each in probe.rollouts) / count
    found = (
        f"rewards {mean:.3g} on average, deviation {first['reward/std']:.3g}; {none:.0%} of the groups have one reward"
    )
    remedy = (
        "where all completions of a prompt have the same reward nothing is learned: all wrong, start_from=<a run of"
        " recipe=sft> or an easier reward; all right, harder prompts; or more of them, rollout.num_generations=16"
    )
    yield judge("rewards differ within groups", found, passes=none < _NO_SPREAD, fails=none == 1, remedy=remedy)
    errors = sum(each.row["reward/errors"] for each in probe.rollouts)
    found = f"{errors:.0f} failures in {count} rollouts"
    remedy = "a reward function raises, hangs or dies: the log above has its error"
    yield judge("reward functions work", found, passes=not errors, remedy=remedy)
    truncated = max(each.row["rollout/truncated_fraction"] for each in probe.rollouts)
    found = f"{truncated:.0%} are cut off, {first['rollout/tokens_mean']:.4g} tokens on average"
    remedy = "most completions never end: a larger rollout.max_new_tokens, or weights that were taught to end an answer"
    yield judge("completions end", found, passes=truncated < _TRUNCATED, fails=False, remedy=remedy)
    gap = max(each.row["rollout/logprob_gap"] for each in probe.rollouts)
    found = f"{gap:.2g} nats per token"
    remedy = "sampling and training compute differently: precision=32-true, or loss.importance=token_truncate"
    yield judge("sampler and model agree", found, passes=gap < _GAP, fails=gap > _LARGE_GAP, remedy=remedy)
    last = max(probe.rollouts, key=lambda each: each.rollout_seconds)  # others learn from the same completions
    each_ms = 1e3 * last.reward_seconds / last.num_completions
    found = (
        f"{each_ms:.2g} ms per completion, {last.reward_seconds:.2g} s in a step; sampling {last.rollout_seconds:.2g} s"
    )
    remedy = "the device waits for rewards: a faster function, or one that scores all completions of a call at once"
    passes = last.reward_seconds <= _SLOW * (last.rollout_seconds + last.reward_seconds)
    yield judge("rewards are faster than sampling", found, passes=passes, fails=False, remedy=remedy)
