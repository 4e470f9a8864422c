"""Data classes of the layout search: layouts, model shapes, recordings and estimates."""

from dataclasses import dataclass

from recipes.mesh import Mesh
from recipes.plan.pipeline import Pipeline
from recipes.plan.places import Places


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
