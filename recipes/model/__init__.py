"""Protocols that models implement, and the parameter names that initialization and weight loading rely on."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, Protocol, cast

from torch import Tensor, nn

from recipes.model.flops import Flops
from recipes.model.kv_cache import KeyValueCache

__all__ = ["Flops", "ImageModel", "KeyValueCache", "LanguageModel", "Model", "Stack", "as_model"]


class Stack(NamedTuple):
    """Several matrices in one weight, for optimizers that compute with whole matrices.

    Attributes:
        sizes: Outputs of each matrix; with several groups, of each matrix in a group.
        num_groups: Number of groups that repeat these sizes, such as heads that hold query, key and value each.
        by_columns: Whether the weight is stored as [inputs, outputs], unlike that of `nn.Linear`.
    """

    sizes: tuple[int, ...]
    num_groups: int = 1
    by_columns: bool = False


class Model(Protocol):
    """One architecture, built in three steps: constructed on the meta device, `to_empty`, then `weights.initialize`.

    `init.init_decoder` and `weights` find parameters by name, so the names of a decoder are part of its interface:
    `embedding.weight` and `head.weight` have one row per token and are zero in padded rows; parameters named
    `*norm.weight` are set to 1 and `*bias` to 0; `*.out.weight` ends a residual branch and is scaled by depth.

    Attributes:
        input_kind: Kind of its samples, such as "tokens", "images" or "tensors": that of the task and the data. A plain
            literal, because the config check reads it from source.
        published_format: Reader of published weights, "huggingface", "timm", "torchvision" or "image_tower"; no such
            attribute: the first.
        pretrained: Weights to start from: a folder, a file or a hub name; None (or no such attribute): `init_weights`.
        blocks: Units of compilation, activation recomputation and sharding. A model with several towers has a method
            `named_blocks` instead, see `recipes.blocks`.
    """

    input_kind: ClassVar[str]
    pretrained: str | None
    blocks: nn.ModuleList
    __call__: Callable[..., Any]

    def init_weights(self, seed: int) -> None:
        """Initialize every parameter and buffer in place, from (seed, parameter name, unsharded shape) only."""

    def init_buffers(self) -> None:
        """Initialize every buffer in place, because loaded weights do not contain buffers."""

    def modules(self) -> Iterator[nn.Module]: ...
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...


def as_model(module: nn.Module) -> Model:
    """Return a module that implements `Model`, for mypy: no type is both."""
    return cast(Model, module)


class LanguageModel(Model, Protocol):
    """Tokens [B, T] int64 -> logits [B, T, V]; with a cache, logits of the last position [B, 1, V].

    A model whose `forward` also accepts `reduce` (see `decoder.Head`) supports chunked loss; one that accepts
    `positions` (see `documents.Documents`) supports packed documents.

    Attributes:
        vocab_size: V without padding.
        max_seq_len: Largest T, including tokens in the cache.
    """

    vocab_size: int
    max_seq_len: int

    def forward(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor: ...
    def flops_per_token(self, seq_len: float) -> Flops: ...


class ImageModel(Model, Protocol):
    """Images [B, C, H, W] float -> logits [B, V].

    Attributes:
        num_classes: Number of classes, V.
    """

    num_classes: int

    def forward(self, images: Tensor) -> Tensor: ...
    def flops_per_sample(self, image_size: int) -> Flops: ...
