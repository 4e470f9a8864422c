"""Ways to divide a run over ranks, what must be known of a model to estimate one, and what an estimate says."""

from dataclasses import dataclass

from recipes.mesh import Mesh
from recipes.plan.pipeline import Pipeline
from recipes.plan.places import Places


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A way to divide a run.

    Attributes:
        mesh: Of one stage of the pipeline.
        pipeline: Its stages.
        micro_batch_size: Samples of a data rank per forward pass.
        num_micro_batches: Per optimizer step.
    """

    mesh: Mesh
    pipeline: Pipeline
    micro_batch_size: int
    num_micro_batches: int


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What an estimate needs to know of a model.

    Attributes:
        seq_len: Tokens of a sample.
        hidden_size: Of the residual stream.
        context_elements: Of queries, keys, values and results of a token in a block, which context ranks exchange.
        residual_itemsize: Bytes of an element between blocks.
        compute_itemsize: Of a gathered weight, and of queries.
        reduce_itemsize: Of a gradient that is summed over ranks.
        state_bytes: Of weight, gradient and optimizer state, a parameter.
        gradient_bytes: Of the gradient alone.
        buffer_bytes: Of what is no parameter, on every rank.
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
    """The places of a model with one way to recompute.

    Attributes:
        one: Of a rank that divides nothing but state, with one sample.
        two_samples: With two.
        two_ranks: With one, of two ranks that divide matrices; None: they cannot be divided.
        num_context_passes: How often queries go through context ranks: forward, backward, and again if recomputed.
        launch_seconds: In which the host starts a kernel.
        num_shards: That divide the optimizer state in the recordings.
    """

    one: Places
    two_samples: Places
    two_ranks: Places | None
    num_context_passes: int
    launch_seconds: float
    num_shards: int


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a layout needs.

    Attributes:
        layout: It.
        peak_bytes: Of a rank, at most.
        step_seconds: Of an optimizer step.
        exposed_seconds: Of these, waiting for communication.
        bubble: Share of a step in which a rank of the pipeline has no work.
    """

    layout: Layout
    peak_bytes: float
    step_seconds: float
    exposed_seconds: float
    bubble: float
