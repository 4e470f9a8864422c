"""Small decoders sharded over ranks that are threads of this process, as the strategy shards them, and on one device.

Shapes: B sequences, T tokens, V vocabulary size.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from recipes.mesh import Mesh
from recipes.model.gpt2 import GPT2
from recipes.model.init import fill, generator_for, named_parameters
from recipes.model.llama import Llama
from recipes.model.moe import MoeLlama
from recipes.numerics.head_loss import HeadLoss
from recipes.numerics.loss import IGNORE_INDEX
from recipes.parallel.experts import make_expert_mesh
from recipes.parallel.groups import make_groups
from recipes.parallel.placement import cut_box, find_box, find_row_orders
from recipes.precision import Precision
from recipes.strategy.fsdp import FSDP2Strategy

VOCAB_SIZE, SEQ_LEN, NUM_SAMPLES = 50, 16, 4
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,  # padded to 64 rows: the last of four ranks has only 2 real ones
    "max_seq_len": SEQ_LEN,
    "num_layers": 2,
    "hidden_size": 32,
}
_LLAMA: dict[str, Any] = _SIZES | {"ffn_hidden_size": 48, "rope_theta": 10_000.0}
MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: GPT2(**_SIZES, num_heads=4, dropout=0.0),
    "gpt2, untied": lambda: GPT2(**_SIZES, num_heads=4, dropout=0.0, tie_embeddings=False),
    "llama": lambda: Llama(**_LLAMA, num_heads=8, num_kv_heads=4, qk_norm=True),
    "llama, tied": lambda: Llama(**_LLAMA, num_heads=4, num_kv_heads=4, tie_embeddings=True),
    # four ranks can shard its query heads but not its key-value heads; three ranks can shard neither
    "llama, 2 groups": lambda: Llama(**_LLAMA, num_heads=4, num_kv_heads=2),
    "llama, 3 heads": lambda: Llama(**_LLAMA, num_heads=3, num_kv_heads=3, head_dim=8),
}

# sharded by experts, not by matrices
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "rope_theta": 1e4}
EXPERTS: dict[str, Callable[[], Any]] = {
    "experts": lambda: MoeLlama(**_SIZES, **_EXPERTS, num_heads=4, num_kv_heads=2),
}

# different summation order in float32, relative to a tensor's largest value; a gradient accumulates more of it: even on
# one device it is up to 3.7e-6 off float64 (query norm of "llama", MKL on a Zen 2), so two orders may differ by twice
# that
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 5e-7, 8e-6


class ThreadStrategy(FSDP2Strategy):
    """FSDP2 on a rank that is a thread: without Lightning's trainer, and without processes."""

    def __init__(self, mesh: Mesh, *, precision: str = "32-true") -> None:
        super().__init__(
            devices=[torch.device("cpu")],
            precision=Precision(name=precision),  # type: ignore[arg-type]
            mesh=mesh,
            cpu_offload=False,
            gradient_sync="per_micro_batch",
            reshard_after_forward=True,
            reduce_dtype="float32",
            gather_for_generation="auto",
        )
        self.mesh, self.groups = mesh, make_groups(mesh)
        self.data_size, self.averaged_size = mesh.data_size, mesh.averaged_size
        shape = self.mesh_shape()
        self._expert_mesh = make_expert_mesh(mesh, "cpu")
        self._device_mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))

    root_device = torch.device("cpu")  # type: ignore[assignment]


@dataclass(frozen=True)
class Batch:
    """Samples for all ranks.

    Attributes:
        inputs: [B, T].
        targets: [B, T], some excluded from the loss.
        positions: [B, T], position of each token in its document; None if each row is one document.
    """

    inputs: Tensor
    targets: Tensor
    positions: Tensor | None = None


def make_batch(*, packed: bool = False, seq_len: int = SEQ_LEN) -> Batch:
    """Return a batch that is identical on every call."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randint(VOCAB_SIZE, (2, NUM_SAMPLES, seq_len), generator=generator)
    targets[0, :5] = IGNORE_INDEX
    targets[3, 7:] = IGNORE_INDEX
    positions = torch.arange(seq_len).repeat(NUM_SAMPLES, 1)
    for row, lengths in enumerate([(3, 9), (1,), (5, 5, 3), (11,)]):  # the rest of a row is one more document
        starts = torch.tensor([0, *lengths]).cumsum(0)
        for start in starts:
            positions[row, int(start) :] = torch.arange(seq_len - int(start))
    return Batch(inputs, targets, positions if packed else None)


def draw_weights(model: nn.Module) -> None:
    """Set every parameter, including padding, to values of order 1, so that each affects the loss."""
    for name, parameter in named_parameters(model):
        values = torch.randn(parameter.shape, generator=generator_for(name, seed=0)) * 0.2
        fill(parameter, values + 1.0 if "norm.weight" in name else values)
    model.init_buffers()  # type: ignore[operator]


def make_model(
    name: str, mesh: Mesh | None = None, *, initialize: Callable[[Any], None] = draw_weights, precision: str = "32-true"
) -> Any:
    """Return a model on one device, or this rank's shard of it."""
    if mesh is None:
        model = (MODELS | EXPERTS)[name]()
        initialize(model)
        return model
    with torch.device("meta"):
        model = (MODELS | EXPERTS)[name]()
    ThreadStrategy(mesh, precision=precision).materialize(model, initialize)
    return model


def cut_batch(batch: Batch, model: Any, mesh: Mesh, rank: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return this rank's inputs and targets, and any other model inputs."""
    inputs, targets = (x.chunk(mesh.data_size)[mesh.data_rank(rank)] for x in (batch.inputs, batch.targets))
    options = {}
    if batch.positions is not None:  # of all tokens, even under context parallelism
        options["positions"] = batch.positions.chunk(mesh.data_size)[mesh.data_rank(rank)]
    if model.context is not None:
        inputs, targets = (model.context.own_tokens(x, dim=1) for x in (inputs, targets))
    return inputs, targets, options


def run_backward(
    model: Any, batch: Batch, mesh: Mesh | None = None, *, rank: int = 0, in_chunks: bool = True
) -> Tensor:
    """Run a forward and a backward pass as the task does, and return the loss of this rank's tokens.

    Args:
        model: Model on one device, or this rank's shard.
        batch: Samples for all ranks.
        mesh: Mesh of the ranks; None for one device.
        rank: This rank.
        in_chunks: Whether to compute logits in chunks of tokens.
    """
    mesh = Mesh() if mesh is None else mesh
    inputs, targets, options = cut_batch(batch, model, mesh, rank)
    if in_chunks:
        ranks = model.head.ranks
        head_loss = HeadLoss(
            vocab_size=VOCAB_SIZE,
            chunk_tokens=13,
            label_smoothing=0.0,
            z_loss=0.0,
            vocabulary_group=None if ranks is None else ranks.group,
        )
        total, *_ = model(inputs, reduce=functools.partial(head_loss, targets=targets), **options)
    else:
        logits = model(inputs, **options).float().flatten(0, 1)
        total = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    num_targets = int((batch.targets != IGNORE_INDEX).sum())
    (total * mesh.averaged_size / num_targets).backward()  # engines average over these ranks
    loss: Tensor = total.detach() / num_targets
    return loss


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients on one device, by name."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(grad is not None and grad.any() for grad in gradients.values())
    return gradients  # type: ignore[return-value]


def gradient_differences(model: nn.Module, expected: dict[str, Tensor]) -> Iterator[tuple[str, float]]:
    """Yield each gradient's difference from one device on this rank's shard, relative to its largest value."""
    orders = find_row_orders(model)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == expected.keys()
    for name, parameter in parameters.items():
        grad: Any = parameter.grad
        assert isinstance(parameter, DTensor)
        assert isinstance(grad, DTensor)
        assert grad.placements == parameter.placements
        whole = expected[name]
        if id(parameter) in orders:
            whole = orders[id(parameter)].to_ranks(whole)
        part = cut_box(whole, *find_box(parameter))
        local = grad.to_local()
        if local.numel():
            yield name, float((local - part.view(local.shape)).abs().max() / whole.abs().max())
