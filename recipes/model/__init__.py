"""The contract of a model: what the rest of this project calls, and how weights are found by name."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from recipes.model.flops import Flops
from recipes.model.kv_cache import KeyValueCache

__all__ = ["Flops", "ImageModel", "KeyValueCache", "LanguageModel", "Model"]


class Model(Protocol):
    """One architecture, built in three steps: constructed on the meta device, `to_empty`, then `weights.initialize`.

    `init.init_decoder` and `weights` find parameters by name, so the names of a decoder are part of its contract:
    `embedding.weight` and `head.weight` have one row per token and are zero in padded rows; names that end in
    `norm.weight` are set to 1 and in `bias` to 0; `.out.weight` ends a residual branch and is scaled by depth.

    Attributes:
        input_kind: "tokens" or "images"; a plain literal, because the config check reads it from source.
        pretrained: Weights to start from: a folder, a file or a hub name; None (or no such attribute): `init_weights`.
        blocks: The units that are compiled, recomputed in the backward pass, and sharded.
    """

    input_kind: ClassVar[str]
    pretrained: str | None
    blocks: nn.ModuleList
    __call__: Callable[..., Any]

    def init_weights(self, seed: int) -> None:
        """Set every parameter and buffer in place, from (seed, parameter name, unsharded shape) alone."""

    def init_buffers(self) -> None:
        """Set every buffer in place: what loaded weights do not contain."""

    def modules(self) -> Iterator[nn.Module]: ...
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...


class LanguageModel(Model, Protocol):
    """Tokens [B, T] int64 -> logits [B, T, V]; with a cache, logits of the last position [B, 1, V].

    A model whose `forward` also takes `reduce` (see `decoder.Head`) is trained without all its logits at once; one that
    takes `positions` (see `documents.Documents`), on documents packed into rows.

    Attributes:
        vocab_size: V without padding.
        max_seq_len: Largest T, tokens in the cache included.
    """

    vocab_size: int
    max_seq_len: int

    def forward(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor: ...
    def flops_per_token(self, seq_len: int) -> Flops: ...


class ImageModel(Model, Protocol):
    """Images [B, C, H, W] float -> logits [B, V].

    Attributes:
        num_classes: V.
    """

    num_classes: int

    def forward(self, images: Tensor) -> Tensor: ...
    def flops_per_sample(self, image_size: int) -> Flops: ...
