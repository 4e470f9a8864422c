"""Estimate memory and time of a step on any mesh by scaling recorded places of a model.

The cost of a place is the sum of a per-weight term, a per-token term that is replicated over tensor ranks, and one that
is sharded over them. Three recordings separate them: one rank with one sample, one with two samples, and two ranks.
"""

from dataclasses import dataclass

from recipes.mesh import Mesh
from recipes.plan.hardware import Cluster
from recipes.plan.pipeline import Pipeline
from recipes.plan.places import Place, Places
from recipes.plan.roofline import Seconds
from recipes.plan.stages import send_boundaries

# Data classes of the layout search: layouts, model shapes, recordings and estimates.


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A way to parallelize a run.

    Attributes:
        mesh: Mesh of one pipeline stage.
        pipeline: Pipeline stages.
        micro_batch_size: Samples per forward pass of a data-parallel rank.
        num_micro_batches: Micro-batches per optimizer step.
    """

    mesh: Mesh
    pipeline: Pipeline
    micro_batch_size: int
    num_micro_batches: int


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Properties of a model needed for estimates.

    Attributes:
        seq_len: Tokens per sample.
        hidden_size: Width of the residual stream.
        context_elements: Elements of queries, keys, values and outputs per token and block that context ranks exchange.
        residual_itemsize: Bytes of an element between blocks.
        compute_itemsize: Bytes of an element of gathered weights and of queries.
        reduce_itemsize: Bytes of an element of reduced gradients.
        state_bytes: Bytes of weight, gradient and optimizer state per parameter.
        gradient_bytes: Bytes of the gradient per parameter.
        buffer_bytes: Bytes of buffers on every rank.
    """

    seq_len: int
    hidden_size: int
    context_elements: float
    residual_itemsize: int
    compute_itemsize: int
    reduce_itemsize: int
    state_bytes: float
    gradient_bytes: float
    buffer_bytes: float


@dataclass(frozen=True, kw_only=True)
class Recordings:
    """Recorded places of a model with one recomputation setting.

    Attributes:
        one: Places without tensor parallelism, with one sample.
        two_samples: Places with two samples.
        two_ranks: Places with one sample and two tensor-parallel ranks; None if unsupported.
        num_context_passes: Number of context-parallel exchanges: forward, backward, and again if recomputed.
        launch_seconds: Time to launch a kernel.
        num_shards: Shards of the optimizer state in the recordings.
    """

    one: Places
    two_samples: Places
    two_ranks: Places | None
    num_context_passes: int
    launch_seconds: float
    num_shards: int


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated memory and time of a layout.

    Attributes:
        layout: The layout.
        peak_bytes: Peak memory of the fullest rank.
        step_seconds: Time of an optimizer step.
        exposed_seconds: Part of it spent waiting for communication.
        bubble: Fraction of a step in which a pipeline rank is idle.
    """

    layout: Layout
    peak_bytes: float
    step_seconds: float
    exposed_seconds: float
    bubble: float


@dataclass(frozen=True)
class _Scaled:
    """A place on a rank, in a micro-batch."""

    num_parameters: float  # on this rank, before sharding
    forward: float
    backward: float
    weights: float  # part of the backward pass for weight gradients
    kept: float
    extra: float
    sent: dict[bool, tuple[float, int]]  # over tensor ranks: is_reduction -> (bytes, calls)


class Estimator:
    """Estimates layouts of one model with one recomputation setting.

    Args:
        recordings: Recordings of its places.
        shape: Shape of the model.
        cluster: The devices.
    """

    def __init__(self, recordings: Recordings, shape: Shape, cluster: Cluster) -> None:
        self._recordings = recordings
        self._shape = shape
        self._cluster = cluster
        self._scaled: dict[tuple[int, float], dict[str, _Scaled]] = {}
        self._counts: dict[Pipeline, list[int]] = {}
        self._num_blocks = recordings.one.num_blocks
        self._whole = Pipeline().parts([self._num_blocks], 0)  # number of occurrences of each place

    def estimate(self, layout: Layout) -> Estimate:
        """Return the estimate for a layout."""
        mesh, pipeline, num_micro = layout.mesh, layout.pipeline, layout.num_micro_batches
        samples = layout.micro_batch_size / mesh.context
        places = self._places(mesh.tensor, samples)
        counts = self._count_blocks(pipeline)
        waits = {name: self._wait(place, name, mesh, samples) for name, place in places.items()}
        best = (0.0, 0.0, 0.0, 0.0)
        peak = share = 0.0
        total = sum(times * places[name].num_parameters for times, name in self._whole)
        for rank in {0, len(counts) - 1, counts.index(max(counts))}:
            parts = pipeline.parts(counts, rank)
            forward = sum(n * (places[name].forward + waits[name][0]) for n, name in parts)
            backward = sum(n * (places[name].backward + waits[name][1]) for n, name in parts)
            if forward + backward > best[0] + best[1]:
                weights = sum(n * places[name].weights for n, name in parts)
                best = forward, backward, weights, sum(n * sum(waits[name]) for n, name in parts)
            own = sum(n * places[name].num_parameters for n, name in parts)
            share = max(share, own / total)
            peak = max(peak, self._peak(layout, places, parts, own, rank))
        forward, backward, weights, waited = best
        exposed = self._wait_for_shards(layout, places, share * total, forward)
        idle = 0.0
        if pipeline.num_stages > 1:
            idle = pipeline.idle_seconds(forward, backward, weights=weights)
            num_bytes = samples * self._shape.seq_len * self._shape.hidden_size * self._shape.residual_itemsize
            num_bytes /= mesh.tensor if mesh.sequence_parallel else 1
            boundary = send_boundaries(pipeline, self._cluster, mesh, num_bytes=num_bytes, num_micro_batches=num_micro)
            exposed += boundary.exposed_seconds
        optimizer = self._recordings.one.optimizer.total * self._recordings.num_shards
        optimizer *= share / (mesh.tensor * mesh.shard * mesh.context)
        seconds = num_micro * (forward + backward) + idle + exposed + optimizer
        return Estimate(
            layout=layout,
            peak_bytes=peak,
            step_seconds=seconds,
            exposed_seconds=exposed + num_micro * waited,
            bubble=idle / seconds,
        )

    def _count_blocks(self, pipeline: Pipeline) -> list[int]:
        if pipeline not in self._counts:
            places = self._recordings.one
            last = places.last.num_parameters / places.block.num_parameters
            self._counts[pipeline] = pipeline.split(places.num_blocks, last=last)
        return self._counts[pipeline]

    def _places(self, tensor: int, samples: float) -> dict[str, _Scaled]:
        if (tensor, samples) not in self._scaled:
            self._scaled[tensor, samples] = {
                name: self._scale(name, tensor, samples) for name in ("first", "block", "last")
            }
        return self._scaled[tensor, samples]

    def _scale(self, name: str, tensor: int, samples: float) -> _Scaled:
        recorded = self._recordings
        one, more = getattr(recorded.one, name), getattr(recorded.two_samples, name)
        divided: Place = one if recorded.two_ranks is None else getattr(recorded.two_ranks, name)

        def scale(a: float, b: float, c: float) -> float:
            return _interpolate(a, b, c, tensor=tensor, samples=samples)

        def scale_seconds(a: Seconds, b: Seconds, c: Seconds) -> Seconds:
            values = {
                kind: scale(getattr(a, kind), getattr(b, kind), getattr(c, kind))
                for kind in ("matmul", "convolution", "attention", "memory")
            }
            launches = c.num_launches if tensor > 1 else a.num_launches
            waiting = max(launches * recorded.launch_seconds - sum(values.values()), 0.0)
            return Seconds(**values, waiting=waiting)

        forward = scale_seconds(one.forward, more.forward, divided.forward)
        backward = scale_seconds(one.backward, more.backward, divided.backward)
        sent: dict[bool, tuple[float, int]] = {}
        for op in divided.collectives if tensor > 1 else ():
            is_sum = "all_reduce" in op.name
            num_bytes, calls = sent.get(is_sum, (0.0, 0))
            sent[is_sum] = num_bytes + samples * op.cost.num_bytes / divided.num_copies, calls + 1
        return _Scaled(
            num_parameters=one.num_parameters / tensor,
            forward=forward.total,
            backward=backward.total,
            weights=(backward.matmul + backward.convolution) / 2,
            kept=scale(one.kept_bytes, more.kept_bytes, divided.kept_bytes),
            extra=scale(one.extra_bytes, more.extra_bytes, divided.extra_bytes),
            sent={is_sum: (size, calls // divided.num_copies) for is_sum, (size, calls) in sent.items()},
        )

    def _wait(self, place: _Scaled, name: str, mesh: Mesh, samples: float) -> tuple[float, float]:
        """Return the exposed tensor- and context-parallel communication of a place, forward and backward."""
        cluster, size = self._cluster, mesh.tensor
        seconds = 0.0
        for is_sum, (num_bytes, calls) in place.sent.items():
            latency = cluster.reduction_latency(size) if is_sum else cluster.latency_between(size)
            seconds += (2 if is_sum else 1) * (size - 1) / size * num_bytes / cluster.bandwidth_between(size)
            seconds += calls * latency
        if name == "block" and mesh.context > 1:
            shape, size, passes = self._shape, mesh.context, self._recordings.num_context_passes
            num_bytes = samples * shape.seq_len * shape.context_elements * shape.compute_itemsize / mesh.tensor
            rate = cluster.bandwidth_between(size, stride=mesh.tensor)
            latency = cluster.latency_between(size, stride=mesh.tensor)
            seconds += passes * (num_bytes * (size - 1) / size / rate + 4 * latency)
        return seconds / 3, 2 * seconds / 3

    def _peak(
        self,
        layout: Layout,
        places: dict[str, _Scaled],
        parts: list[tuple[int, str]],
        num_parameters: float,
        rank: int,
    ) -> float:
        """Return the peak bytes of a pipeline rank, given its number of parameters before sharding."""
        shape, mesh = self._shape, layout.mesh
        shards = mesh.shard * mesh.context
        in_flight = layout.pipeline.in_flight(rank, layout.num_micro_batches)
        kept = in_flight * sum(n * places[name].kept for n, name in parts)
        extra = max(places[name].extra for _, name in parts)
        state = num_parameters / shards * shape.state_bytes + shape.buffer_bytes
        if layout.pipeline.num_stages > 1:  # gathered, and gradients, until the end of the step
            return state + kept + extra + num_parameters * (shape.compute_itemsize + shape.reduce_itemsize)
        block = places["block"].num_parameters
        gathered = (block + max(block, places["last"].num_parameters)) * shape.compute_itemsize if shards > 1 else 0.0
        if layout.num_micro_batches > 1:
            return state + kept + extra + gathered
        # with a single micro-batch, gradients exist only when its activations are gone
        gradients = num_parameters / shards * shape.gradient_bytes
        return max(state - gradients + kept + extra + gathered, state + extra + gathered)

    def _wait_for_shards(
        self, layout: Layout, places: dict[str, _Scaled], num_parameters: float, forward: float
    ) -> float:
        """Return the exposed time of weight gathers and gradient reductions in a step."""
        shape, mesh, cluster = self._shape, layout.mesh, self._cluster
        shards = mesh.shard * mesh.context

        def gather(count: float, itemsize: int) -> float:
            sent = count * itemsize * (shards - 1) / shards
            return sent / rate + latency if shards > 1 else 0.0

        def add_up(count: float) -> float:
            if mesh.replicate == 1:
                return 0.0
            sent = 2 * (mesh.replicate - 1) / mesh.replicate * count / shards * shape.reduce_itemsize
            return sent / across + cluster.reduction_latency(mesh.replicate, stride=stride)

        rate, latency = (f(shards, stride=mesh.tensor) for f in (cluster.bandwidth_between, cluster.latency_between))
        stride = shards * mesh.tensor
        across = cluster.bandwidth_between(mesh.replicate, stride=stride)
        if layout.pipeline.num_stages > 1:
            gathered = gather(num_parameters, shape.compute_itemsize)
            return max(gathered - forward, 0.0) + gather(num_parameters, shape.reduce_itemsize) + add_up(num_parameters)
        block, first = places["block"], places["first"]
        weights = gather(block.num_parameters, shape.compute_itemsize)
        gradients = gather(block.num_parameters, shape.reduce_itemsize)
        waited = self._num_blocks * max(weights - block.forward, 0.0)
        waited += self._num_blocks * max(weights + gradients - block.backward, 0.0)
        waited += gather(
            first.num_parameters, shape.residual_itemsize + shape.reduce_itemsize
        )  # begins and ends a step
        computed = sum(n * places[name].backward for n, name in self._whole)
        waited += max(add_up(num_parameters) - computed, 0.0)
        return layout.num_micro_batches * waited


def _interpolate(one: float, two_samples: float, two_ranks: float, *, tensor: int, samples: float) -> float:
    """Extrapolate to a number of ranks and samples from one rank and sample, two samples, and two ranks."""
    of_weights = min(max(2 * one - two_samples, 0.0), one)
    of_sample = one - of_weights
    undivided = min(max(2 * (two_ranks - of_weights / 2) - of_sample, 0.0), of_sample)
    return of_weights / tensor + samples * (undivided + (of_sample - undivided) / tensor)
