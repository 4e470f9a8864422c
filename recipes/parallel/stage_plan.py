"""Plan the split of a model's layers into pipeline stages, and of stages over ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from recipes.mesh import STAGES_PER_RANK
from recipes.numerics.grouped_linear import GroupedLinear


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """Assignment of layers to stages and of stages to pipeline ranks.

    Attributes:
        num_ranks: Pipeline ranks.
        schedule: Name of the schedule in torch.
        layers: First layer and number of layers of each stage.
    """

    num_ranks: int
    schedule: str
    layers: tuple[tuple[int, int], ...]

    @property
    def num_stages(self) -> int:
        """Number of stages on all ranks."""
        return len(self.layers)

    def rank_of(self, stage: int) -> int:
        """Return the rank of a stage; in a V schedule, the later stages return through the ranks."""
        turn, rank = divmod(stage, self.num_ranks)
        return self.num_ranks - 1 - rank if self.schedule == "ZBVZeroBubble" and turn % 2 else rank

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank in order."""
        return [stage for stage in range(self.num_stages) if self.rank_of(stage) == rank]


def plan_stages(model: nn.Module, *, num_ranks: int, schedule: str) -> StagePlan:
    """Split the layers of a model into stages so that the largest stage is as small as possible.

    Work is the number of matrix weights that each token is multiplied with: blocks (only the active experts) and the
    head, which costs as much as several blocks of a small model. The embedding is a lookup and does not count.

    Args:
        model: Whole model, on any device.
        num_ranks: Pipeline ranks.
        schedule: Name of the schedule in torch.
    """
    num_stages = num_ranks * STAGES_PER_RANK.get(schedule, 1)
    blocks: Any = model.blocks
    work = [_count(block, model) for block in blocks]
    last = sum(_count(model.get_submodule(name), model) for name in list_ends(model)[1])
    counts = divide_evenly(work, num_stages, last=last)
    firsts = [sum(counts[:stage]) for stage in range(num_stages)]
    return StagePlan(num_ranks=num_ranks, schedule=schedule, layers=tuple(zip(firsts, counts, strict=True)))


def _count(module: nn.Module, model: Any) -> int:
    """Return the number of a module's weights that a token is multiplied with."""
    idle = 0
    for part in module.modules():
        if isinstance(part, GroupedLinear):
            idle += part.weight.numel() * (model.num_experts - model.num_experts_per_tok) // model.num_experts
    return sum(parameter.numel() for parameter in module.parameters()) - idle


def divide_evenly(work: Sequence[int], num_stages: int, *, last: int) -> list[int]:
    """Return the number of layers of each stage, at least one, that minimizes the largest stage's work.

    Args:
        work: Work of each layer.
        num_stages: Number of stages, at most the number of layers.
        last: Work of the last stage in addition to its layers.
    """
    num_layers = len(work)
    assert num_stages <= num_layers, (num_stages, num_layers)
    sums = [0]
    for amount in work:
        sums.append(sums[-1] + amount)
    # best[n]: the smallest possible maximum over the stages so far with n layers in total, and the last one's start
    best: list[tuple[int, list[int]]] = [(sums[n], [n]) for n in range(num_layers + 1)]
    for stage in range(1, num_stages):
        extra = last if stage == num_stages - 1 else 0
        best = [
            min(
                ((max(best[cut][0], sums[n] - sums[cut] + extra), [*best[cut][1], n - cut]) for cut in range(stage, n)),
                key=lambda found: found[0],
                default=(sums[-1] * 2 + last, []),
            )
            for n in range(num_layers + 1)
        ]
    return best[num_layers][1]


def list_ends(model: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the modules that only the first stage has, and those that only the last has."""
    ends: Any = model.pipeline_ends
    return ends[0], ends[1]
