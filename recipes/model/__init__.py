"""What a model is to the rest of the house, and where its first weights come from. Free."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from recipes.model.decoder import KeyValueCache
from recipes.model.flops import Flops

__all__ = ["Flops", "ImageModel", "KeyValueCache", "LanguageModel", "Model"]


class Model(Protocol):
    """One architecture: may be built on the meta device, then `to_empty`, then `initialize`.

    Attributes:
        input_kind: "tokens" or "images"; a plain literal, read from source.
        pretrained: Where weights come from: a folder, a file or a hub name; None or no such attribute:
            `init_weights`.
        blocks: The units that are compiled, checkpointed and sharded.
    """

    input_kind: ClassVar[str]
    pretrained: str | None
    blocks: nn.ModuleList
    __call__: Callable[..., Any]

    def init_weights(self, seed: int) -> None:
        """Set every parameter and buffer in place, from (seed, parameter name, shape) alone."""

    def init_buffers(self) -> None:
        """Set every buffer in place: the part of `init_weights` that loaded weights leave open."""

    def modules(self) -> Iterator[nn.Module]: ...
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...


class LanguageModel(Model, Protocol):
    """Tokens [B, T] -> logits [B, T, V]; with a cache, logits of the last position [B, 1, V]."""

    vocab_size: int
    max_seq_len: int

    def forward(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor: ...
    def flops_per_token(self, seq_len: int) -> Flops: ...


class ImageModel(Model, Protocol):
    """Images [B, C, H, W] -> logits [B, V]."""

    num_classes: int

    def forward(self, images: Tensor) -> Tensor: ...
    def flops_per_sample(self, image_size: int) -> Flops: ...
