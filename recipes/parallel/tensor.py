"""Tensor parallelism (Megatron-LM, arXiv 1909.08053): N ranks divide every matrix, and the sequence between matrices.

The first matrix of an MLP or an attention is cut by columns of its output, the second by those of its input: one
all-gather before and one reduce-scatter after both (sequence parallelism, arXiv 2205.05198), or, without it, one
all-reduce after them. The vocabulary is cut by tokens.

Parameters are DTensors, so that FSDP2, the gradient norm and checkpoints know what a rank holds; products take their
local part, so that every kernel, the compiler and the losses in chunks work as on one device.

Shapes: B sequences, T tokens, t = T / N tokens of a rank, W hidden size, V padded vocabulary.
"""

from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from typing_extensions import override

from recipes.errors import ConfigError
from recipes.numerics.collectives import GatherParts, JoinColumns, ScatterSum, SumParts, UseOnAll
from recipes.numerics.linear import Linear, get_product_dtype, linear
from recipes.numerics.rms_norm import RMSNorm, rms_norm
from recipes.parallel.placement import RowOrder

Cut = Literal["columns", "rows", "vocabulary", "positions", "norm", "head_norm"]


class TensorRanks:
    """The ranks that divide the matrices of a model; one object for all of its layers.

    Args:
        mesh: One-dimensional.
        sequence_parallel: Divide the sequence between matrices, too.

    Attributes:
        sequence_parallel: As given.
        group: The ranks.
        splits_sequence: Whether the forward pass under way does: that of generated text has single tokens.
    """

    def __init__(self, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
        self.mesh = mesh
        self.group = mesh.get_group()
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        self.splits_sequence = self.sequence_parallel = sequence_parallel

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Decide before a forward pass of a model, as its hook, whether it divides the sequence.

        Args:
            model: Whose forward pass it is.
            args: Tokens [B, T], or hidden states [B, t, W] of an earlier stage, which has decided; then a cache.
            kwargs: `cache`, if it is not among these; with one, the model generates text.
        """
        x, cache = args[0], kwargs.get("cache", args[1] if len(args) > 1 else None)
        divides = x.ndim != 2 or x.shape[1] % self.size == 0
        self.splits_sequence = self.sequence_parallel and cache is None and divides

    def count_tokens(self, x: Tensor) -> int:
        """Return T of tokens [B, T] or hidden states [B, t, W]."""
        return x.shape[1] * (self.size if x.ndim == 3 and self.splits_sequence else 1)

    def enter(self, x: Tensor) -> Tensor:
        """Return what every rank needs before a matrix cut by columns: [B, t, W] -> [B, T, W].

        It is sent as the product rounds it. It stays in its own dtype all the same: the gradients of several products
        are added in that, as on one device.
        """
        if self.splits_sequence:
            out: Tensor = GatherParts.apply(x, self.group, 1, get_product_dtype(x))  # type: ignore[no-untyped-call]
        else:
            out = UseOnAll.apply(x, self.group)  # type: ignore[no-untyped-call]
        return out

    def enter_module(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Gather what enters an attention or an MLP, as its hook, once for all of its matrices."""
        return self.enter(args[0]), *args[1:]

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of what a matrix cut by rows gives: [B, T, W] -> [B, t, W]."""
        if self.splits_sequence:
            out: Tensor = ScatterSum.apply(x, self.group, 1)  # type: ignore[no-untyped-call]
        else:
            out = SumParts.apply(x, self.group)  # type: ignore[no-untyped-call]
        return out

    def join_columns(self, x: Tensor) -> Tensor:
        """Return the columns of all ranks."""
        out: Tensor = JoinColumns.apply(x, self.group)  # type: ignore[no-untyped-call]
        return out

    def own_tokens(self, x: Tensor, *, dim: int) -> Tensor:
        """Return this rank's part of something along the sequence; all of it where the sequence is not divided."""
        own: Tensor = x.chunk(self.size, dim=dim)[self.rank] if self.splits_sequence else x
        return own

    def local(self, parameter: Tensor | None, *, of_heads: bool = False) -> Any:
        """Return this rank's part of a parameter.

        One that every rank has whole gets a part of its gradient from each where the ranks have other tokens.

        Args:
            parameter: Of a layer; None: it has none of the name.
            of_heads: It is applied to heads, of which the ranks have others whether they divide the sequence or not.
        """
        if not isinstance(parameter, DTensor):
            return parameter
        has_whole = all(placement.is_replicate() for placement in parameter.placements)
        is_partial = has_whole and (self.splits_sequence or of_heads)
        placements = [Partial()] if is_partial else parameter.placements
        return parameter.to_local(grad_placements=placements)


class ColumnLinear(Linear):
    """A linear layer of which each rank has some outputs; its input is whole."""

    ranks: TensorRanks

    @override
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.ranks.local(self.weight), self.ranks.local(self.bias))


class RowLinear(Linear):
    """A linear layer of which each rank has some inputs; the outputs of all are added."""

    ranks: TensorRanks

    @override
    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = self.ranks.leave(linear(input, self.ranks.local(self.weight)))
        if self.bias is not None:  # after the sum, or every rank would add it
            out = out + self.ranks.local(self.bias).to(out.dtype)
        return out


class VocabularyEmbedding(nn.Embedding):
    """An embedding of which each rank has some tokens."""

    ranks: TensorRanks

    @override
    def forward(self, input: Tensor) -> Tensor:
        """[B, T] -> [B, t, W]"""
        weight = self.ranks.local(self.weight)  # [V / N, W]
        rows = input - self.ranks.rank * len(weight)  # [B, T]
        is_own = (rows >= 0) & (rows < len(weight))
        embedded = F.embedding(torch.where(is_own, rows, 0), weight)  # [B, T, W]
        return self.ranks.leave(torch.where(is_own[..., None], embedded, 0.0))


class PositionEmbedding(nn.Embedding):
    """An embedding of positions, which every rank has whole."""

    ranks: TensorRanks

    @override
    def forward(self, input: Tensor) -> Tensor:
        """[..., T] -> [..., t, W]"""
        return F.embedding(self.ranks.own_tokens(input, dim=-1), self.ranks.local(self.weight))


class ReplicatedLayerNorm(nn.LayerNorm):
    """A layer norm of this rank's tokens."""

    ranks: TensorRanks

    @override
    def forward(self, input: Tensor) -> Tensor:
        weight, bias = self.ranks.local(self.weight), self.ranks.local(self.bias)
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


class ReplicatedRMSNorm(RMSNorm):
    """An RMS norm of this rank's tokens."""

    ranks: TensorRanks
    of_heads: ClassVar[bool] = False

    @override
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.ranks.local(self.weight, of_heads=self.of_heads), eps=self.eps)


class HeadRMSNorm(ReplicatedRMSNorm):
    """An RMS norm of this rank's heads."""

    of_heads: ClassVar[bool] = True


_PLACEMENTS: dict[Cut, Placement] = {
    "columns": Shard(0),
    "rows": Shard(1),
    "vocabulary": Shard(0),
    "positions": Replicate(),
    "norm": Replicate(),
    "head_norm": Replicate(),
}
_LAYERS: dict[tuple[Cut, type[nn.Module]], type[nn.Module]] = {
    ("columns", Linear): ColumnLinear,
    ("rows", Linear): RowLinear,
    ("vocabulary", nn.Embedding): VocabularyEmbedding,
    ("positions", nn.Embedding): PositionEmbedding,
    ("norm", nn.LayerNorm): ReplicatedLayerNorm,
    ("norm", RMSNorm): ReplicatedRMSNorm,
    ("head_norm", RMSNorm): HeadRMSNorm,
}


def divide_tensors(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Divide the matrices of a model over the ranks of a mesh, in place.

    Args:
        model: Not yet sharded, on the meta device.
        mesh: One-dimensional.
        sequence_parallel: Divide the sequence between matrices, too.

    Raises:
        ConfigError: The model does not declare how it is divided.
    """
    if not hasattr(model, "tensor_parallel"):
        raise ConfigError(
            f"tensor_parallel_size={mesh.size()}",
            f"{type(model).__name__} does not declare how its matrices are divided",
            "tensor_parallel_size=1, or model=gpt2 or a Llama",
        )
    ranks = TensorRanks(mesh, sequence_parallel=sequence_parallel)
    for module in list(model.modules()):
        plan: dict[str, Cut] = getattr(module, "tensor_parallel", {})
        for name, cut in plan.items():
            child = getattr(module, name, None)
            if child is not None:
                _divide(child, cut, ranks)
        if "columns" in plan.values():
            module.register_forward_pre_hook(ranks.enter_module)
        if hasattr(module, "split_heads"):
            _divide_heads(module, ranks)
    divided: Any = model
    divided._tie()  # the weight of an embedding is another object now
    divided.ranks = ranks
    model.register_forward_pre_hook(ranks.begin, with_kwargs=True)


def _divide(module: nn.Module, cut: Cut, ranks: TensorRanks) -> None:
    """Replace the parameters of one layer by DTensors, and its forward pass by that of a part."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        # the bias of a matrix cut by rows is added once, after the sum
        placement = Replicate() if cut == "rows" and parameter.ndim == 1 else _PLACEMENTS[cut]
        divided = distribute_tensor(parameter.detach(), ranks.mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))
    module.ranks = ranks  # type: ignore[assignment]
    if (cut, type(module)) in _LAYERS:
        module.__class__ = _LAYERS[cut, type(module)]
    elif not hasattr(type(module), "ranks"):  # a head knows itself that ranks divide it
        raise TypeError(f"a {type(module).__name__} cannot be divided by {cut}")


def _divide_heads(module: Any, ranks: TensorRanks) -> None:
    """Let an attention compute its share of the heads, of which it has queries, keys and values."""
    for name, sizes in module.stacked_rows().items():
        layer = module.get_submodule(name.rpartition(".")[0])
        layer.row_order = RowOrder(sizes=sizes, num_ranks=ranks.size)
    module.split_heads(ranks.size)


def mark_row_orders(model: nn.Module) -> None:
    """Let `recipes.model.init.fill` know in which order a parameter holds its rows."""
    for layer in model.modules():
        if hasattr(layer, "row_order"):
            for parameter in layer.parameters(recurse=False):
                parameter.row_order = layer.row_order  # type: ignore[attr-defined]
