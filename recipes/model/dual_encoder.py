"""Any image model of timm beside a small causal transformer that reads captions.

Shapes: B pairs, C channels, S pixels a side, T tokens, W width of text, F numbers of a feature.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from recipes.blocks import Tower
from recipes.errors import ConfigError
from recipes.model.decoder import check_heads
from recipes.model.gpt2 import Block
from recipes.model.init import constant_, init_decoder, normal_
from recipes.model.norm import Norm
from recipes.model.timm_model import TimmModel, import_timm
from recipes.model.two_towers import TwoTowers
from recipes.numerics.linear import Linear

_OF_IMAGES = re.compile(r"model\.(name|arguments|pretrained)\b")


class TextTower(nn.Module):
    """Captions [B, T] -> hidden state of their last token [B, W], by the blocks of GPT-2.

    Args:
        vocab_size: Number of tokens.
        max_seq_len: T.
        hidden_size: W.
        num_layers: Number of blocks.
        num_heads: Attention heads; they divide W.
        dropout: Dropout probability on the embedding, attention weights and residual branches.
    """

    def __init__(
        self, *, vocab_size: int, max_seq_len: int, hidden_size: int, num_layers: int, num_heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.position = nn.Embedding(max_seq_len, hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(hidden_size=hidden_size, num_heads=num_heads, dropout=dropout) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(hidden_size)

    @override
    def forward(self, tokens: Tensor, is_token: Tensor) -> Tensor:
        """Read a caption at its last token, which sees nothing of the padding behind it.

        Args:
            tokens: [B, T] int64.
            is_token: [B, T] bool, False for padding.
        """
        rows = torch.arange(tokens.shape[1], device=tokens.device)  # [T]
        x = self.dropout(self.embedding(tokens) + self.position(rows))  # [B, T, W]
        for block in self.blocks:
            x = block(x)
        last = (is_token.sum(dim=1) - 1).clamp(min=0)  # [B]; a row without tokens only fills up a batch
        out: Tensor = self.norm(x[torch.arange(len(x), device=x.device), last])  # [B, W]
        return out


class DualEncoder(TwoTowers):
    """A tower of timm without its head, a tower of text, and a linear projection of each.

    Args:
        image_name: Name of the image model in timm, such as vit_small_patch16_224.
        image_size: S.
        in_channels: C.
        norm: What normalizes in the place of batch norm in the tower of images, see `recipes.model.norm`.
        image_arguments: Further arguments of the image model in timm, such as depth.
        image_pretrained: Weights that the tower of images starts from, as `pretrained` of `TimmModel`; None: initial
            weights by timm's rules.
        vocab_size: Number of tokens.
        max_seq_len: T.
        hidden_size: W.
        num_layers: Blocks of the tower of text.
        num_heads: Attention heads of these blocks; they divide W.
        dropout: Dropout probability in the tower of text.
        projection_size: F.
        init_scale: What similarities are multiplied by at first.
        init_bias: What is added to them at first; None: nothing, ever.

    Raises:
        ConfigError: timm is not installed, has no such model, or the model does not take a setting.
    """

    input_kind: ClassVar[str] = "images_and_text"
    published_format: ClassVar[str] = "image_tower"
    free_at_resume: ClassVar[tuple[str, ...]] = ("norm",)  # batch, sync and frozen have the same weights

    def __init__(
        self,
        *,
        image_name: str,
        image_size: Annotated[int, ">= 1"],
        in_channels: Annotated[int, ">= 1"],
        norm: Norm,
        image_arguments: Mapping[str, Any],
        image_pretrained: str | None,
        vocab_size: Annotated[int, ">= 2, <= 16777216"],
        max_seq_len: Annotated[int, ">= 1, <= 16777216"],
        hidden_size: Annotated[int, ">= 1, <= 1048576"],
        num_layers: Annotated[int, ">= 1, <= 1024"],
        num_heads: Annotated[int, ">= 1"],
        dropout: Annotated[float, ">= 0, <= 0.999"],
        projection_size: Annotated[int, ">= 1"],
        init_scale: Annotated[float, ">= 1, <= 100"],
        init_bias: Annotated[float, ">= -100, <= 100"] | None,
    ) -> None:
        super().__init__()
        check_heads(num_heads, hidden_size=hidden_size)
        self.title = f"{image_name} and text"
        self.pretrained = image_pretrained
        self.vocab_size, self.max_seq_len = vocab_size, max_seq_len
        self.image_size, self.in_channels = image_size, in_channels
        self.projection_size = projection_size
        self.hidden_size, self.num_layers = hidden_size, num_layers
        self.init_scale, self.init_bias = init_scale, init_bias
        with naming_image_tower():
            self.image = TimmModel(
                name=image_name,
                num_classes=0,  # its last layer returns features
                in_channels=in_channels,
                image_size=image_size if _takes_size(image_name) else None,
                drop_path=0.0,
                dropout=0.0,
                norm=norm,
                arguments=image_arguments,
                pretrained=image_pretrained,
            )
        self.text = TextTower(
            vocab_size=vocab_size,
            max_seq_len=max_seq_len,
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            dropout=dropout,
        )
        self.image_projection = Linear(self.image.inner.head_hidden_size, projection_size, bias=False)
        self.text_projection = Linear(hidden_size, projection_size, bias=False)
        self.logit_scale = nn.Parameter(torch.empty(1))
        self.logit_bias = None if init_bias is None else nn.Parameter(torch.empty(1))

    @override
    def encode_images(self, images: Tensor) -> Tensor:
        features: Tensor = self.image_projection(self.image(images))  # [B, F]
        return features

    @override
    def encode_captions(self, tokens: Tensor, is_token: Tensor | None) -> Tensor:
        features: Tensor = self.text_projection(self.text(tokens, is_token))  # [B, F]
        return features

    @override
    def scalars(self) -> tuple[nn.Parameter, nn.Parameter | None]:
        return self.logit_scale, self.logit_bias

    @override
    def text_tower(self) -> tuple[nn.Module, int]:
        return self.text, self.hidden_size

    @override
    def number_towers(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        images = {f"image.{name}": number for name, number in self.image.number_layers().items()}
        text = {f"text.{name}": self._number_of_text(name) for name, _ in self.text.named_parameters()}
        return images, text

    def _number_of_text(self, name: str) -> int:
        first, _, rest = name.partition(".")
        if first == "blocks":
            return int(rest.partition(".")[0]) + 1
        return self.num_layers if first == "norm" else 0

    def names_without_decay(self) -> set[str]:
        """Return the parameters that are not decayed whatever their shape, as timm names them."""
        return {f"image.{name}" for name in self.image.names_without_decay()}

    def named_blocks(self) -> dict[str, Tower]:
        """Return the blocks of both towers by name."""
        images = {f"image.{name}": tower for name, tower in self.image.named_blocks().items()}
        return images | {"text.blocks": self.text.blocks}

    def init_weights(self, seed: int) -> None:
        """Initialize every parameter and buffer in place, from the seed and the names."""
        self.image.init_weights(seed)
        self.init_beside_images(seed)

    def init_beside_images(self, seed: int) -> None:
        """Initialize in place all but the tower of images."""
        init_decoder(self.text, seed=seed, num_layers=self.num_layers, vocab_size=self.vocab_size)
        for name in ("image_projection", "text_projection"):  # features as large as what they project, as in CLIP
            layer: Linear = self.get_submodule(name)  # type: ignore[assignment]
            normal_(layer.weight, name=f"{name}.weight", seed=seed, std=layer.in_features**-0.5)
        constant_(self.logit_scale, math.log(self.init_scale))
        if self.logit_bias is not None and self.init_bias is not None:
            constant_(self.logit_bias, self.init_bias)

    def init_buffers(self) -> None:
        """Set those of the tower of images, such as running statistics; does nothing on the meta device."""
        self.image.init_buffers()


def _takes_size(name: str) -> bool:
    """Return whether a model of timm is constructed for a size of images, as the weights of a ViT depend on it."""
    timm = import_timm()
    return timm.is_model(name) and bool(timm.get_pretrained_cfg(name).fixed_input_size)


@contextmanager
def naming_image_tower() -> Iterator[None]:
    """Let errors about an image model, whose code speaks of `model.name`, name the settings of a dual encoder."""
    try:
        yield
    except ConfigError as error:
        parts = (_OF_IMAGES.sub(r"model.image_\1", text) for text in (error.setting, error.reason, error.fix))
        raise ConfigError(*parts) from error
