"""Tensor parallelism (Megatron-LM, arXiv 1909.08053): N ranks shard every matrix, and optionally the sequence.

The first matrices of an MLP or attention block are column-parallel (sharded by output features), the second is
row-parallel (by input features): one all-gather before and one reduce-scatter after the block (sequence parallelism,
arXiv 2205.05198), or, without it, one all-reduce after it. Embedding and LM head are sharded by vocabulary.

Parameters are DTensors, so that FSDP2, the gradient norm and checkpoints know what a rank holds; matmuls use the local
shards, so that every kernel, the compiler and the chunked loss work as on one device.

Shapes: B sequences, T tokens, t = T / N tokens of a rank, W hidden size, V padded vocabulary.
"""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from typing_extensions import override

from recipes.errors import ConfigError
from recipes.numerics.collectives import CopyToRanks, GatherParts, JoinColumns, ReduceFromRanks, ScatterSum
from recipes.numerics.linear import Linear, get_product_dtype, linear
from recipes.numerics.rms_norm import RMSNorm, rms_norm
from recipes.parallel.placement import RowOrder

ParallelStyle = Literal["columns", "rows", "vocabulary", "positions", "norm", "head_norm"]


class TensorRanks:
    """Tensor-parallel ranks of a model; one object shared by all of its layers.

    Args:
        mesh: One-dimensional.
        sequence_parallel: Also shard activations along the sequence outside attention and MLP.

    Attributes:
        sequence_parallel: As given.
        group: The ranks.
        splits_sequence: Whether the current forward pass shards the sequence; token-by-token generation does not.
    """

    def __init__(self, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
        self.mesh = mesh
        self.group = mesh.get_group()
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        self.splits_sequence = self.sequence_parallel = sequence_parallel

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Decide, as a pre-forward hook of the model, whether the pass shards the sequence.

        Args:
            model: Model of the forward pass.
            args: Tokens [B, T], or already sharded hidden states [B, t, W] in a later stage; optionally a cache.
            kwargs: `cache`, if not in `args`; with a cache the model generates text.
        """
        x, cache = args[0], kwargs.get("cache", args[1] if len(args) > 1 else None)
        divides = x.ndim != 2 or x.shape[1] % self.size == 0
        self.splits_sequence = self.sequence_parallel and cache is None and divides

    def count_tokens(self, x: Tensor) -> int:
        """Return T of tokens [B, T] or hidden states [B, t, W]."""
        return x.shape[1] * (self.size if x.ndim == 3 and self.splits_sequence else 1)

    def gather_input(self, x: Tensor) -> Tensor:
        """Gather the input of column-parallel layers: [B, t, W] -> [B, T, W].

        `x` is sent in the dtype of the matmul (autocast's) and cast back to its own afterwards, so that the gradients
        of the matmuls that use it are summed in that dtype, as on one device.
        """
        if self.splits_sequence:
            out: Tensor = GatherParts.apply(x, self.group, 1, get_product_dtype(x))
        else:
            out = CopyToRanks.apply(x, self.group)
        return out

    def gather_module_input(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Gather the input of an attention block or MLP, as its hook, once for all of its matrices."""
        return self.gather_input(args[0]), *args[1:]

    def reduce_output(self, x: Tensor) -> Tensor:
        """Sum the partial outputs of a row-parallel layer over the ranks: [B, T, W] -> [B, t, W]."""
        if self.splits_sequence:
            out: Tensor = ScatterSum.apply(x, self.group, 1)
        else:
            out = ReduceFromRanks.apply(x, self.group)
        return out

    def join_columns(self, x: Tensor) -> Tensor:
        """Concatenate the output features of all ranks."""
        out: Tensor = JoinColumns.apply(x, self.group)
        return out

    def own_tokens(self, x: Tensor, *, dim: int) -> Tensor:
        """Return this rank's shard of `x` along the sequence, which is `dim`; all of it without sequence sharding."""
        shard: Tensor = x.chunk(self.size, dim=dim)[self.rank] if self.splits_sequence else x
        return shard

    def local(self, parameter: Tensor | None, *, of_heads: bool = False) -> Any:
        """Return this rank's shard of a parameter.

        The gradient of a replicated parameter is partial on each rank wherever ranks process different tokens or
        heads; it is then summed over the ranks.

        Args:
            parameter: Parameter of a layer; None, for a missing bias, is returned unchanged.
            of_heads: Whether it is applied per head; ranks always hold different heads.
        """
        if not isinstance(parameter, DTensor):
            return parameter
        is_replicated = all(placement.is_replicate() for placement in parameter.placements)
        is_partial = is_replicated and (self.splits_sequence or of_heads)
        placements = [Partial()] if is_partial else parameter.placements
        return parameter.to_local(grad_placements=placements)


class ColumnLinear(Linear):
    """Column-parallel linear layer: each rank computes some output features from the full input."""

    ranks: TensorRanks

    @override
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.ranks.local(self.weight), self.ranks.local(self.bias))


class RowLinear(Linear):
    """Row-parallel linear layer: each rank holds some input features; partial outputs are summed over ranks."""

    ranks: TensorRanks

    @override
    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = self.ranks.reduce_output(linear(input, self.ranks.local(self.weight)))
        if self.bias is not None:  # after the sum, or every rank would add it
            out = out + self.ranks.local(self.bias).to(out.dtype)
        return out


class VocabularyEmbedding(nn.Embedding):
    """Vocabulary-parallel embedding: each rank holds some rows."""

    ranks: TensorRanks

    @override
    def forward(self, input: Tensor) -> Tensor:
        """[B, T] -> [B, t, W]"""
        weight = self.ranks.local(self.weight)  # [V / N, W]
        rows = input - self.ranks.rank * len(weight)  # [B, T]
        is_own = (rows >= 0) & (rows < len(weight))
        embedded = F.embedding(torch.where(is_own, rows, 0), weight)  # [B, T, W]
        return self.ranks.reduce_output(torch.where(is_own[..., None], embedded, 0.0))


class PositionEmbedding(nn.Embedding):
    """Embedding of positions, replicated on every rank."""

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


_PLACEMENTS: dict[ParallelStyle, Placement] = {
    "columns": Shard(0),
    "rows": Shard(1),
    "vocabulary": Shard(0),
    "positions": Replicate(),
    "norm": Replicate(),
    "head_norm": Replicate(),
}
_LAYERS: dict[tuple[ParallelStyle, type[nn.Module]], type[nn.Module]] = {
    ("columns", Linear): ColumnLinear,
    ("rows", Linear): RowLinear,
    ("vocabulary", nn.Embedding): VocabularyEmbedding,
    ("positions", nn.Embedding): PositionEmbedding,
    ("norm", nn.LayerNorm): ReplicatedLayerNorm,
    ("norm", RMSNorm): ReplicatedRMSNorm,
    ("head_norm", RMSNorm): HeadRMSNorm,
}


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Shard the matrices of a model over the ranks of a mesh, in place.

    Args:
        model: Unsharded model on the meta device.
        mesh: One-dimensional mesh.
        sequence_parallel: Also shard activations along the sequence outside attention and MLP.

    Raises:
        ConfigError: The model has no `tensor_parallel` plan.
    """
    if not hasattr(model, "tensor_parallel"):
        raise ConfigError(
            f"tensor_parallel_size={mesh.size()}",
            f"{type(model).__name__} has no plan that shards its matrices",
            "tensor_parallel_size=1, or model=gpt2, or model=llama_1b",
        )
    ranks = TensorRanks(mesh, sequence_parallel=sequence_parallel)
    for module in list(model.modules()):
        plan: dict[str, ParallelStyle] = getattr(module, "tensor_parallel", {})
        for name, style in plan.items():
            child = getattr(module, name, None)
            if child is not None:
                _shard_layer(child, style, ranks)
        if "columns" in plan.values():
            module.register_forward_pre_hook(ranks.gather_module_input)
        if hasattr(module, "split_heads"):
            _shard_heads(module, ranks)
    sharded: Any = model
    sharded._tie()  # the embedding weight is a new object now
    sharded.ranks = ranks
    model.register_forward_pre_hook(ranks.begin, with_kwargs=True)


def _shard_layer(module: nn.Module, style: ParallelStyle, ranks: TensorRanks) -> None:
    """Replace the parameters of one layer with DTensors, and its class with the tensor-parallel one."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        # the bias of a row-parallel layer is added once, after the sum
        placement = Replicate() if style == "rows" and parameter.ndim == 1 else _PLACEMENTS[style]
        sharded = distribute_tensor(parameter.detach(), ranks.mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
    untyped: Any = module
    untyped.ranks = ranks
    if (style, type(module)) in _LAYERS:
        module.__class__ = _LAYERS[style, type(module)]
    elif not hasattr(type(module), "ranks"):  # the LM head uses `ranks` by itself
        raise TypeError(f"{type(module).__name__} has no tensor-parallel version for {style!r}")


def _shard_heads(module: Any, ranks: TensorRanks) -> None:
    """Make an attention block compute only this rank's heads."""
    for name, sizes in module.stacked_rows().items():
        layer = module.get_submodule(name.rpartition(".")[0])
        layer.row_order = RowOrder(sizes=sizes, num_ranks=ranks.size)
    module.split_heads(ranks.size)


def mark_row_orders(model: nn.Module) -> None:
    """Record the row orders of parameters for `recipes.model.init.fill`."""
    for layer in model.modules():
        if hasattr(layer, "row_order"):
            parameters: Iterator[Any] = layer.parameters(recurse=False)
            for parameter in parameters:
                parameter.row_order = layer.row_order
