"""Pipeline parallelism: the layers of a model are split into stages that pass on hidden states.

Training uses torch's schedules (`recipes.parallel.schedule`). Validation, per-sample losses and text generation run the
stages one after another, here.

Shapes: B sequences, T tokens, W hidden size, V padded vocabulary.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recipes.blocks import list_blocks, named_blocks
from recipes.errors import ConfigError
from recipes.mesh import STAGES_PER_RANK
from recipes.numerics.grouped_linear import GroupedLinear

# Plan the split of a model's layers into pipeline stages, and of stages over ranks.


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

    Raises:
        ConfigError: The model has several towers of blocks.
    """
    num_stages = num_ranks * STAGES_PER_RANK.get(schedule, 1)
    towers = named_blocks(model)
    if len(towers) != 1:
        raise ConfigError(
            f"pipeline_parallel_size={num_ranks}",
            f"it splits one tower of blocks into stages, and {type(model).__name__} has {' and '.join(towers)}",
            "pipeline_parallel_size=1",
        )
    [blocks] = towers.values()
    work = [_count(block, model) for block in blocks.children()]
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


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_DIMS = 4


class StageForward(nn.Module):
    """Mixed in before the class of a stage's model; the last stage computes the objective of a micro-batch.

    Attributes:
        compute: (forward pass, hidden states, rest of the micro-batch) -> objective; set on the last stage.
        leave: (this stage, hidden states, rest of the micro-batch) -> output for the next stage; set on the others.
    """

    compute: Callable[[Callable[..., Any], Tensor, Mapping[str, Tensor]], Tensor] | None = None
    leave: Callable[[nn.Module, Tensor, Mapping[str, Tensor]], Tensor] | None = None

    def forward(
        self,
        x: Tensor,
        cache: Any = None,
        reduce: Callable[[Tensor, Tensor], Any] | None = None,
        positions: Tensor | None = None,
        num_inputs: Tensor | None = None,
        **targets: Tensor,
    ) -> Any:
        """Return hidden states or logits; with targets, the result of `compute` or `leave`."""
        run: Callable[..., Any] = super().forward
        if self.compute is None or not targets:
            out = run(x, cache=cache, reduce=reduce, positions=positions, num_inputs=num_inputs)
            if not targets:
                return out
            out = out if self.leave is None else self.leave(self, out, targets)
            # the next stage sends a gradient whether or not this one, or what of it comes before, is frozen
            return out.requires_grad_() if torch.is_grad_enabled() and not out.requires_grad else out
        rest = {"positions": positions, "num_inputs": num_inputs}
        given = {name: tensor for name, tensor in rest.items() if tensor is not None}
        return self.compute(run, x, targets | given)


def cut_stage(model: nn.Module, plan: StagePlan, stage: int, *, whole: nn.Module | None = None) -> nn.Module:
    """Return one stage as a model of the same class, which shares its modules with the whole model.

    Args:
        model: Whole model, on any device.
        plan: Assignment of layers to stages.
        stage: Index of the stage.
        whole: Unmodified copy of the model, needed to load published weights.
    """
    part = copy.copy(model)
    object.__setattr__(part, "whole", whole)  # not registered as a submodule
    for name, value in vars(model).items():
        if isinstance(value, (dict, set)):  # modules, parameters, buffers and hooks are per stage
            object.__setattr__(part, name, copy.copy(value))
    first, count = plan.layers[stage]
    blocks = list_blocks(model)
    part.blocks = nn.ModuleDict({str(index): blocks[index] for index in range(first, first + count)})
    at_first, at_last = list_ends(model)
    dropped = (at_first if stage > 0 else ()) + (at_last if stage < plan.num_stages - 1 else ())
    for name in dropped:
        part._modules[name] = None
    if stage == plan.num_stages - 1 > 0 and getattr(model, "tie_embeddings", False):
        _untie(part)
    part.__class__ = type(f"{type(model).__name__}Stage", (StageForward, type(model)), {})
    return part


def _untie(part: Any) -> None:
    """Give the head a copy of the tied embedding of another stage; their gradients are summed."""
    part.head = copy.copy(part.head)
    weight = part.head.weight
    part.head._parameters = {"weight": nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)}
    part.head.copies = {"weight": "embedding.weight"}


def mark_copies(model: nn.Module) -> None:
    """Set `copy_of`, the name of the original, on each parameter that is a copy from another stage."""
    for layer in model.modules():
        for name, original in getattr(layer, "copies", {}).items():
            getattr(layer, name).copy_of = original


def is_copy(parameter: Tensor) -> bool:
    """Return whether a parameter is a copy of another stage's, which alone is counted and saved."""
    return hasattr(parameter, "copy_of")


class PipelineRanks:
    """Pipeline-parallel ranks.

    Args:
        group: Process group of the ranks.
        plan: Assignment of stages to ranks.
        device: Device of this rank.
    """

    def __init__(self, group: dist.ProcessGroup, plan: StagePlan, device: torch.device) -> None:
        self.group = group
        self.rank = group.rank()
        self.plan = plan
        self.device = device
        self.own_stages = plan.stages_of(self.rank)

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage, which computes the loss."""
        return self.plan.num_stages - 1 in self.own_stages

    def send(self, tensor: Tensor, stage: int) -> None:
        """Send a tensor to the rank of a stage, preceded by its shape."""
        target = dist.get_global_rank(self.group, self.plan.rank_of(stage))
        dist.send(self._describe(tensor), target, self.group)
        dist.send(tensor.contiguous(), target, self.group)

    def receive(self, stage: int) -> Tensor:
        """Receive a tensor from the rank of a stage."""
        source = dist.get_global_rank(self.group, self.plan.rank_of(stage))
        header = torch.empty(_MAX_DIMS + 2, dtype=torch.int64, device=self.device)
        dist.recv(header, source, self.group)
        tensor = self._allocate(header)
        dist.recv(tensor, source, self.group)
        return tensor

    def share_last(self, tensor: Tensor | None) -> Tensor:
        """Broadcast a tensor from the last stage to every rank."""
        source = dist.get_global_rank(self.group, self.plan.rank_of(self.plan.num_stages - 1))
        header = torch.empty(_MAX_DIMS + 2, dtype=torch.int64, device=self.device)
        if tensor is not None:
            header = self._describe(tensor)
        dist.broadcast(header, source, self.group)
        shared = self._allocate(header) if tensor is None else tensor.detach().contiguous()
        dist.broadcast(shared, source, self.group)
        return shared

    def add_up(self, first: Tensor | None, last: Tensor | None) -> None:
        """Replace a tensor of the first stage and one of the last with their sum, in place and in the same order.

        Args:
            first: Tensor on the rank of the first stage.
            last: Tensor on the rank of the last stage.
        """
        if first is not None and last is not None:
            last.copy_(first.add_(last))
        elif first is not None:
            other = torch.empty_like(first)
            end = dist.get_global_rank(self.group, self.plan.rank_of(self.plan.num_stages - 1))
            dist.recv(other, end, self.group)
            dist.send(first.add_(other), end, self.group)
        elif last is not None:
            begin = dist.get_global_rank(self.group, self.plan.rank_of(0))
            dist.send(last, begin, self.group)
            dist.recv(last, begin, self.group)

    def _describe(self, tensor: Tensor) -> Tensor:
        padding = [0] * (_MAX_DIMS - tensor.ndim)
        numbers = [_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape, *padding]
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def _allocate(self, header: Tensor) -> Tensor:
        dtype, ndim, *shape = header.tolist()
        return torch.empty(shape[:ndim], dtype=_DTYPES[dtype], device=self.device)


def list_stages(model: nn.Module) -> list[nn.Module]:
    """Return the stages of a rank, each with the attributes of a whole model; a model without stages itself."""
    parts: dict[int, nn.Module] = getattr(model, "parts", {0: model})
    return list(parts.values())


class StagedModel(nn.Module):
    """The stages of one rank under the names that their modules have in the whole model.

    Outside of training its forward pass runs through the stages of all ranks: every rank of the pipeline calls it with
    the same arguments and gets the same result.

    Args:
        parts: Models by stage.
        ranks: Ranks of the pipeline.
    """

    def __init__(self, parts: Mapping[int, nn.Module], ranks: PipelineRanks) -> None:
        super().__init__()
        for part in parts.values():
            for name, child in part.named_children():
                if name != "blocks":
                    self.add_module(name, child)
                elif "blocks" not in self._modules:  # between embedding and head, as in the whole model
                    self.blocks = nn.ModuleDict(dict(child.named_children()))
                else:
                    self.blocks.update(dict(child.named_children()))
        # not registered as modules: their parameter names would appear twice
        object.__setattr__(self, "parts", dict(parts))
        object.__setattr__(self, "pipeline", ranks)

    def __getattr__(self, name: str) -> Any:
        """Return attributes of the stages' models, such as sizes and the context-parallel setting."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "parts" not in self.__dict__:
                raise
            parts: dict[int, nn.Module] = self.__dict__["parts"]
            return getattr(parts[max(parts)], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Forward the training mode to the stages, which are not registered as modules."""
        super().__setattr__(name, value)
        if name == "training":
            for part in self.__dict__.get("parts", {}).values():
                part.training = value

    def forward(
        self,
        tokens: Tensor,
        cache: Any = None,
        reduce: Callable[[Tensor, Tensor], Any] | None = None,
        positions: Tensor | None = None,
    ) -> Any:
        """Return the logits, or the result of `reduce` on the last hidden states. Takes the model's arguments.

        Raises:
            RuntimeError: Gradients are enabled; training must use a schedule.
        """
        if torch.is_grad_enabled():
            raise RuntimeError("a pipeline computes gradients in its schedule only; wrap this call in torch.no_grad()")
        ranks: PipelineRanks = self.__dict__["pipeline"]
        plan, x = ranks.plan, tokens
        for stage in ranks.own_stages:
            if stage > 0 and plan.rank_of(stage - 1) != ranks.rank:
                x = ranks.receive(stage - 1)
            x = self.__dict__["parts"][stage](x, cache=cache, reduce=reduce, positions=positions)
            if stage < plan.num_stages - 1 and plan.rank_of(stage + 1) != ranks.rank:
                ranks.send(x, stage + 1)
        return ranks.share_last(x if ranks.has_last else None)
