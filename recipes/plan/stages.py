"""Model a pipeline on top of a recorded step: memory, time and communication of its stages.

A stage keeps its weights gathered throughout a step and reduces its gradients once, as FSDP2 does under a pipeline.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from recipes.mesh import Mesh
from recipes.parallel.stages import plan_stages
from recipes.plan.communication import WAITED_FOR, Communication, Traffic, cost_of_collective, measure_shards
from recipes.plan.hardware import Cluster
from recipes.plan.memory import Moment, find_peak
from recipes.plan.pipeline import Pipeline
from recipes.plan.places import Place, Places, describe_places, sum_kept, with_seconds
from recipes.plan.roofline import StepSeconds
from recipes.plan.trace import GATHERED, GRADIENTS, OPTIMIZER, WEIGHTS, Op


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Split of a model's layers into pipeline stages.

    Attributes:
        pipeline: Stages and schedule.
        counts: Blocks per pipeline rank.
        places: Places of the model, without times.
        boundary_bytes: Bytes that a rank sends to the next stage per micro-batch.
    """

    pipeline: Pipeline
    counts: list[int]
    places: Places
    boundary_bytes: float

    def parts(self, stage: int) -> list[tuple[int, str]]:
        """Return how often a stage contains each place."""
        return self.pipeline.parts(self.counts, stage)

    def num_parameters(self, stage: int) -> float:
        """Return the number of parameters of a stage."""
        return sum(times * float(getattr(self.places, name).num_parameters) for times, name in self.parts(stage))

    @property
    def largest_share(self) -> float:
        """Largest fraction of all parameters in one stage."""
        total = sum(times * place.num_parameters for times, place in self.places.parts())
        return max(self.num_parameters(stage) for stage in range(len(self.counts))) / total


def divide_layers(ops: Sequence[Op], model: nn.Module, pipeline: Pipeline, *, boundary_bytes: float) -> Stages:
    """Return the layers of each pipeline rank, balanced by the number of weights that each token is multiplied with.

    Args:
        ops: Operators of a step of the full model.
        model: Unsharded, on any device.
        pipeline: Stages and schedule.
        boundary_bytes: Bytes that a rank sends to the next stage per micro-batch.
    """
    places = describe_places(ops, model)
    divided = plan_stages(model, num_ranks=pipeline.num_stages, schedule=pipeline.schedule)
    counts = [sum(divided.layers[stage][1] for stage in divided.stages_of(rank)) for rank in range(pipeline.num_stages)]
    return Stages(pipeline=pipeline, counts=counts, places=places, boundary_bytes=boundary_bytes)


def stage_moments(
    ops: Sequence[Op],
    moments: Sequence[Moment],
    stages: Stages,
    *,
    num_micro_batches: int,
    gathered_itemsize: int,
    gradient_itemsize: int,
    held_share: float,
) -> list[Moment]:
    """Return the memory timeline of a rank of the fullest stage, given that of a rank that has all layers.

    Args:
        ops: Operators of the step.
        moments: Memory timeline of the step.
        stages: Stages of the pipeline.
        num_micro_batches: Per optimizer step.
        gathered_itemsize: Bytes per gathered weight.
        gradient_itemsize: Bytes per gradient before reduction.
        held_share: Fraction of a stage's weights that one rank holds when they are gathered.
    """
    kept = sum_kept(ops)
    names = [place for place in kept if place not in ("embedding", "head")]
    per_name = stages.places.num_blocks / max(len(names), 1)  # blocks per name: a name may cover a period
    total = sum(times * place.num_parameters for times, place in stages.places.parts())
    candidates = []
    for stage in {0, len(stages.counts) - 1}:
        begin, end = (round(sum(stages.counts[:index]) / per_name) for index in (stage, stage + 1))
        has = {name for _, name in stages.parts(stage)}
        own = [*(["embedding"] if "first" in has else []), *names[begin:end], *(["head"] if "last" in has else [])]
        skipped = [place for place in kept if place not in own]
        parameters = stages.num_parameters(stage)
        gathered = int(parameters * held_share * (gathered_itemsize + gradient_itemsize))
        in_flight = stages.pipeline.in_flight(stage, num_micro_batches)
        candidates.append(
            list(
                _move(
                    moments,
                    own,
                    share=parameters / total,
                    gathered=gathered,
                    more=_sum(kept, own, times=in_flight - 1),
                    less={place: _sum(kept, [s for s in skipped if _is_before(s, place, kept)]) for place in own},
                )
            )
        )
    return max(candidates, key=lambda candidate: find_peak(candidate).total)


def _move(
    moments: Iterable[Moment],
    own: Sequence[str],
    *,
    share: float,
    gathered: int,
    more: Counter[str],
    less: dict[str, Counter[str]],
) -> Iterator[Moment]:
    for moment in moments:
        place = moment.section.partition("/")[2]
        if place and place not in own:
            continue
        held = Counter(moment.held)
        for name in (WEIGHTS, GRADIENTS, OPTIMIZER):
            held[name] = int(share * held[name])
        if place:
            held[GATHERED] = gathered
            held.update(more)
            held.subtract(less[place])
        yield Moment(section=moment.section, op=moment.op, held={key: size for key, size in held.items() if size > 0})


def _sum(kept: dict[str, Counter[str]], places: Iterable[str], *, times: float = 1.0) -> Counter[str]:
    total: Counter[str] = Counter()
    for place in places:
        total.update(kept.get(place, Counter()))
    return Counter({name: int(times * size) for name, size in total.items()})


def _is_before(place: str, other: str, kept: dict[str, Counter[str]]) -> bool:
    order = list(kept)
    return other not in order or order.index(place) < order.index(other)


def time_stages(
    ops: Sequence[Op], step: StepSeconds, cluster: Cluster, mesh: Mesh, stages: Stages, *, num_micro_batches: int
) -> tuple[float, float, Communication]:
    """Return the time of a pipelined step.

    Args:
        ops: Operators of a step of the full model.
        step: Seconds by section.
        cluster: The devices.
        mesh: Mesh of one stage.
        stages: Stages of the pipeline.
        num_micro_batches: Per optimizer step.

    Returns:
        Seconds without the optimizer, the fraction of them in which a stage is idle, and the communication of a rank of
        the slowest stage.
    """
    timed = with_seconds(stages.places, step)
    slowest = max(range(len(stages.counts)), key=lambda stage: sum(_seconds_of(stages, timed, stage, cluster, mesh)))
    forward, backward = _seconds_of(stages, timed, slowest, cluster, mesh)
    parts = [(times, getattr(timed, name)) for times, name in stages.parts(slowest)]
    weights = sum(times * (place.backward.matmul + place.backward.convolution) / 2 for times, place in parts)
    idle = stages.pipeline.idle_seconds(forward, backward, weights=weights)
    model_ranks = sum_collectives(parts, cluster, mesh, num_micro_batches=num_micro_batches)
    boundary = send_boundaries(
        stages.pipeline, cluster, mesh, num_bytes=stages.boundary_bytes, num_micro_batches=num_micro_batches
    )
    shards = _of_shards(ops, cluster, mesh, share=stages.largest_share, forward_seconds=forward)
    busy = num_micro_batches * (forward + backward)
    exposed = sum(part.exposed_seconds for part in (boundary, *shards))
    seconds = busy + idle + exposed
    traffic = tuple(part for part in (*shards, *model_ranks, boundary) if part.num_bytes)
    return seconds, idle / seconds, Communication(traffic=traffic)


def _seconds_of(stages: Stages, timed: Places, stage: int, cluster: Cluster, mesh: Mesh) -> tuple[float, float]:
    """Return the seconds of a stage's forward and backward passes, including waits for model-parallel collectives."""
    forward = backward = 0.0
    for times, name in stages.parts(stage):
        place: Place = getattr(timed, name)
        waits = sum(seconds for _, seconds in place.sent(cluster, mesh).values())
        forward += times * (place.forward.total + waits / 3)
        backward += times * (place.backward.total + 2 * waits / 3)
    return forward, backward


def sum_collectives(
    parts: Iterable[tuple[int, Place]], cluster: Cluster, mesh: Mesh, *, num_micro_batches: int
) -> list[Traffic]:
    """Return the tensor-, context- and expert-parallel traffic per step; none of it overlaps with computation."""
    totals = dict.fromkeys(WAITED_FOR, (0.0, 0.0))
    for times, place in parts:
        for name, (num_bytes, seconds) in place.sent(cluster, mesh).items():
            of_step = times * num_micro_batches
            totals[name] = totals[name][0] + of_step * num_bytes, totals[name][1] + of_step * seconds
    return [
        Traffic(
            dimension=name,
            num_ranks=getattr(mesh, name),
            num_bytes=num_bytes,
            seconds=seconds,
            exposed_seconds=seconds,
        )
        for name, (num_bytes, seconds) in totals.items()
        if num_bytes
    ]


def send_boundaries(
    pipeline: Pipeline, cluster: Cluster, mesh: Mesh, *, num_bytes: float, num_micro_batches: int
) -> Traffic:
    """Return the traffic of activations to the next stage and gradients to the previous one; receivers wait for it.

    Args:
        pipeline: Stages and schedule.
        cluster: The devices.
        mesh: Mesh of one stage.
        num_bytes: Bytes per micro-batch, one way.
        num_micro_batches: Per optimizer step.
    """
    times = 2 * pipeline.num_chunks * num_micro_batches
    stride = mesh.world_size
    seconds = num_bytes / cluster.bandwidth_between(2, stride=stride) + cluster.latency_between(2, stride=stride)
    return Traffic(
        dimension="pipeline",
        num_ranks=pipeline.num_stages,
        num_bytes=times * num_bytes,
        seconds=times * seconds,
        exposed_seconds=times * seconds,
    )


def _of_shards(
    ops: Sequence[Op], cluster: Cluster, mesh: Mesh, *, share: float, forward_seconds: float
) -> list[Traffic]:
    """Return FSDP2's traffic per step: weights gathered once, during the first micro-batch; gradients reduced last."""
    sizes, strides = measure_shards(mesh)
    result = []
    for name, num_ranks in sizes.items():
        gathered = reduced = total = 0.0
        for op in ops:
            is_gather = "gather" in op.name
            if op.dimension != name or "/" not in op.section or (is_gather and not op.section.startswith("forward")):
                continue
            sent, seconds = cost_of_collective(op, cluster, num_ranks=num_ranks, stride=strides[name])
            total += share * sent
            if is_gather:
                gathered += share * seconds
            else:
                reduced += share * seconds
        if num_ranks > 1 and total:
            traffic = Traffic(
                dimension=name,
                num_ranks=num_ranks,
                num_bytes=total,
                seconds=gathered + reduced,
                exposed_seconds=max(gathered - forward_seconds, 0.0) + reduced,
            )
            result.append(traffic)
    return result
