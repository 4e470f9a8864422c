"""Analytical pipeline model: layers per rank, micro-batches in flight, and idle time.

Each of P ranks holds v stages, and the m micro-batches of a step pass through all of them. Formulas: 1F1B and
interleaved stages, arXiv 2104.04473; zero bubbles and the V-shaped schedule (ZBV), arXiv 2401.10241.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from recipes.config.resolved import ResolvedRun
from recipes.errors import ConfigError
from recipes.mesh import STAGES_PER_RANK
from recipes.parallel.stages import divide_evenly

_SCHEDULES = ("1F1B", *STAGES_PER_RANK)


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Pipeline configuration.

    Attributes:
        num_stages: Pipeline ranks, P.
        schedule: `1F1B`, `Interleaved1F1B` or `ZBVZeroBubble`.
    """

    num_stages: int = 1
    schedule: str = "1F1B"

    @property
    def num_chunks(self) -> int:
        """Stages per rank, v."""
        return STAGES_PER_RANK.get(self.schedule, 1)

    def in_flight(self, stage: int, num_micro_batches: int) -> float:
        """Return the maximum number of micro-batches whose activations a rank keeps, in units of all its layers.

        1F1B: P - stage. Interleaved: P (1 + (P - 1) / (P v)) on the first rank. ZBV: P on every rank.
        """
        stages = self.num_stages
        if self.schedule == "ZBVZeroBubble":
            most = float(stages)
        else:
            warm_up = (stages - 1) / self.num_chunks if self.num_chunks > 1 else 0.0
            most = stages - stage + warm_up * (stages - stage) / stages
        return min(most, float(num_micro_batches))

    def idle_seconds(self, forward: float, backward: float, *, weights: float) -> float:
        """Return the idle seconds of a rank per step.

        Args:
            forward: Forward seconds per micro-batch and rank.
            backward: Backward seconds per micro-batch and rank.
            weights: Part of `backward` spent on weight gradients, which ZBV computes in otherwise idle time.
        """
        waits = self.num_stages - 1
        if self.schedule == "ZBVZeroBubble":
            return waits * max(forward + backward - 3 * weights, 0.0)
        return waits * (forward + backward) / self.num_chunks

    def parts(self, counts: Sequence[int], rank: int) -> list[tuple[int, str]]:
        """Return how often a rank holds each place: `first`, `block`, `last`.

        Args:
            counts: Blocks per rank.
            rank: Pipeline rank.
        """
        has_last = rank == (0 if self.schedule == "ZBVZeroBubble" else len(counts) - 1)
        return [*([(1, "first")] if rank == 0 else []), (counts[rank], "block"), *([(1, "last")] if has_last else [])]

    def split(self, num_blocks: int, *, last: float) -> list[int]:
        """Return the number of blocks per rank, split as in `recipes.parallel.stages`.

        Args:
            num_blocks: Blocks of the model, all alike.
            last: Weights of everything after the blocks, in units of one block's weights.
        """
        num_chunks = self.num_stages * self.num_chunks
        chunks = divide_evenly([1000] * num_blocks, num_chunks, last=round(1000 * last))
        counts = [0] * self.num_stages
        for chunk, count in enumerate(chunks):
            turn, rank = divmod(chunk, self.num_stages)
            is_back = self.schedule == "ZBVZeroBubble" and turn % 2
            counts[self.num_stages - 1 - rank if is_back else rank] += count
        return counts


def read_pipeline(resolved: ResolvedRun) -> Pipeline:
    """Return the pipeline of a run.

    Raises:
        ConfigError: The schedule is unknown, or there are more stages than blocks.
    """
    num_stages, schedule = resolved.pipeline_parallel_size, resolved.pipeline_schedule
    if schedule not in _SCHEDULES:
        raise ConfigError(
            f"pipeline_schedule={schedule} mode=plan",
            "a plan has no formula for it",
            f"pipeline_schedule=<{' | '.join(_SCHEDULES)}>",
        )
    num_layers = resolved.model.num_layers
    most = (num_layers or 1) // STAGES_PER_RANK.get(schedule, 1)
    if num_stages > max(most, 1):
        raise ConfigError(
            f"pipeline_parallel_size={num_stages} pipeline_schedule={schedule}",
            f"the model has {num_layers} blocks" if num_layers else "the number of its blocks is not in the config",
            f"pipeline_parallel_size={max(most, 1)}",
        )
    return Pipeline(num_stages=num_stages, schedule=schedule)
