"""CLIP and SigLIP of `transformers`, by folder or hub name.

Shapes: B pairs, C channels, S pixels a side, T tokens, F numbers of a feature.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from recipes.errors import ConfigError
from recipes.model.init import fill, named_parameters
from recipes.model.transformers_models import (
    OF_IMAGES_AND_TEXT,
    check_image_text,
    check_sizes,
    draw_tower,
    list_settings,
    load_config,
    make_model_on_meta,
    make_published,
    reading_model,
)
from recipes.model.two_towers import TwoTowers
from recipes.numerics.linear import Linear

_SCALE, _BIAS = "logit_scale", "logit_bias"
_LAYERS = "encoder.layers"  # in both towers
_OLD_END = 2
_BEFORE_LAYERS = ("embeddings.", "pre_layrnorm.")
# SigLIP starts with a scale of 10 and a bias of -10 (arXiv:2303.15343, section 3.2, and big_vision's config of it);
# transformers (5.24) with 1 and 0, as it is made to load weights
_FIRST_OF_SIGLIP = {_SCALE: math.log(10.0), _BIAS: -10.0}


class TransformersImageText(TwoTowers):
    """Wraps a `CLIPModel` or a `SiglipModel`.

    CLIP reads a caption at its end token, which sees nothing after it: padding needs no mask, for which transformers
    would read values of the mask on the host, and take a slower kernel. SigLIP reads a caption at the last position,
    and was trained with padding as tokens.

    Args:
        name: Folder with config.json, or hub name.
        pretrained: Folder or hub name of weights to start from; None: random weights by the rules of the model.
        max_seq_len: T; None: as many as the model has positions, and SigLIP takes no other number.
        image_size: S; None: that of config.json, which is the only one that the model takes.
        in_channels: C, as in config.json; None: that.
        vocab_size: V, as in config.json; None: that.

    Raises:
        ConfigError: The model does not exist, is of another type or size, or transformers is not installed.
    """

    input_kind: ClassVar[str] = "images_and_text"
    built_by_name: ClassVar[bool] = True  # `model.name` is that of a published one

    def __init__(
        self,
        *,
        name: str,
        pretrained: str | None,
        max_seq_len: Annotated[int, ">= 1"] | None,
        image_size: Annotated[int, ">= 1"] | None,
        in_channels: Annotated[int, ">= 1"] | None,
        vocab_size: Annotated[int, ">= 1"] | None,
    ) -> None:
        super().__init__()
        self.name = name
        self.pretrained = pretrained
        config = load_config(name, wanted=OF_IMAGES_AND_TEXT)
        with reading_model(name, wanted=OF_IMAGES_AND_TEXT):
            check_image_text(config, name=name)
            images, text = config.vision_config, config.text_config
            self.is_siglip = config.model_type == "siglip"
            self.max_seq_len = text.max_position_embeddings if max_seq_len is None else max_seq_len
            self.image_size = images.image_size if image_size is None else image_size
            self.vocab_size = text.vocab_size if vocab_size is None else vocab_size
            self.in_channels = images.num_channels if in_channels is None else in_channels
            if self.in_channels != images.num_channels:
                reason = f"the patches of config.json have {images.num_channels}"
                raise ConfigError(
                    f"model.in_channels={self.in_channels}", reason, f"model.in_channels={images.num_channels}"
                )
            self.projection_size = text.projection_size if self.is_siglip else config.projection_dim
            check_sizes(config, max_seq_len=self.max_seq_len, vocab_size=self.vocab_size)
            self._check_positions(images.image_size, text.max_position_embeddings)
            self.inner: Any = make_published(config, name=name, wanted=OF_IMAGES_AND_TEXT)
        self.title = type(self.inner).__name__
        for own in self._scalar_names():
            setattr(self.inner, own, nn.Parameter(torch.empty(1, device=getattr(self.inner, own).device)))
        self.inner.text_model.embeddings.__class__ = _TextEmbeddings
        for module in self.inner.modules():
            if type(module) is nn.Linear:
                module.__class__ = Linear

    def _check_positions(self, image_size: int, num_positions: int) -> None:
        if self.image_size != image_size:
            reason = f"each patch has a position of its own, and config.json has images of {image_size} pixels"
            raise ConfigError(f"model.image_size={self.image_size}", reason, f"model.image_size={image_size}")
        if self.is_siglip and self.max_seq_len != num_positions:
            reason = f"SigLIP reads a caption at its last position, and config.json has {num_positions}"
            raise ConfigError(f"model.max_seq_len={self.max_seq_len}", reason, f"model.max_seq_len={num_positions}")

    def _scalar_names(self) -> tuple[str, ...]:
        return (_SCALE, _BIAS) if self.is_siglip else (_SCALE,)

    @override
    def encode_images(self, images: Tensor) -> Tensor:
        features: Tensor = self.inner.get_image_features(pixel_values=images).pooler_output  # [B, F]
        return features.clone()  # of SigLIP it is a view, which FSDP2 warns about

    @override
    def encode_captions(self, tokens: Tensor, is_token: Tensor | None) -> Tensor:
        features: Tensor = self.inner.get_text_features(input_ids=tokens).pooler_output  # [B, F]
        return features

    @override
    def scalars(self) -> tuple[nn.Parameter, nn.Parameter | None]:
        return self.inner.logit_scale, self.inner.logit_bias if self.is_siglip else None

    @override
    def text_tower(self) -> tuple[nn.Module, int]:
        tower: nn.Module = self.inner.text_model
        return tower, 0 if self.is_siglip else self.inner.config.text_config.hidden_size

    @override
    def number_towers(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        images, text = (
            {f"inner.{tower}.{name}": number for name, number in _number_tower(getattr(self.inner, tower)).items()}
            for tower in ("vision_model", "text_model")
        )
        return images, text

    def named_blocks(self) -> dict[str, nn.ModuleList]:
        """Return the blocks of both towers by name."""
        towers = (f"{tower}.{_LAYERS}" for tower in ("vision_model", "text_model"))
        return {f"inner.{tower}": self.inner.get_submodule(tower) for tower in towers}

    def check_end(self, end_of_text: int, *, num_ids: int) -> None:
        """Check that CLIP finds the end of captions, where it reads them; SigLIP reads the last position.

        Args:
            end_of_text: Token that ends a caption.
            num_ids: Number of ids of the tokenizer.

        Raises:
            ConfigError: It would read another position.
        """
        text = self.inner.config.text_config
        # models from before transformers 4.31 have 2, and look for the largest id instead
        wanted = num_ids - 1 if text.eos_token_id == _OLD_END else text.eos_token_id
        if not self.is_siglip and end_of_text != wanted:
            reason = f"it reads a caption at its token {wanted}, and captions of this tokenizer end with {end_of_text}"
            fix = f"tokenizer=from_model, or a config.json with text_config.eos_token_id={end_of_text}"
            raise ConfigError(f"model.name={self.name}", reason, fix)

    def modules_reading_children(self) -> list[nn.Module]:
        """Return modules that read weights of their children without calling these."""
        return [self.inner.vision_model.head.attention] if self.is_siglip else []

    def weights_read_outside(self) -> list[nn.Parameter]:
        """Return the weights that `forward` reads itself, and no module that it calls."""
        return [getattr(self.inner, name) for name in self._scalar_names()]

    def published_config(self) -> dict[str, Any]:
        """Return the settings of config.json that change what the weights compute, as plain values."""
        return list_settings(self.inner.config)

    def init_weights(self, seed: int) -> None:
        """Initialize every parameter and buffer in place by the rules of the model, from (seed, name)."""
        parameters = dict(named_parameters(self.inner))
        for name, value in draw_tower(make_model_on_meta(self.inner.config), seed=seed):
            fill(parameters[name], value)
        first = _FIRST_OF_SIGLIP if self.is_siglip else {_SCALE: self.inner.config.logit_scale_init_value}
        for name, number in first.items():
            fill(parameters[name], torch.tensor([float(number)]))
        self.init_buffers()

    @torch.no_grad()
    def init_buffers(self) -> None:
        """Set the numbers of positions; does nothing on the meta device."""
        for name, buffer in self.inner.named_buffers():
            assert name.endswith(".position_ids"), f"{name} is of another version of transformers"
            if not buffer.is_meta:
                buffer.copy_(torch.arange(buffer.shape[1])[None])  # [1, positions]


class _TextEmbeddings(nn.Module):
    """Embeddings of a tower of text; transformers (5.24) reads the shape of a weight that ZeRO-3 gathers later."""

    token_embedding: nn.Embedding
    position_embedding: nn.Embedding
    position_ids: Tensor

    def forward(self, input_ids: Tensor, position_ids: None = None, inputs_embeds: None = None) -> Tensor:
        """Tokens [B, T] -> sums of their embeddings and those of their positions [B, T, W]."""
        assert position_ids is None
        assert inputs_embeds is None
        positions: Tensor = self.position_embedding(self.position_ids[:, : input_ids.shape[1]])  # [1, T, W]
        embedded: Tensor = self.token_embedding(input_ids)
        return embedded + positions


def _number_tower(tower: nn.Module) -> dict[str, int]:
    """Return the layer of each parameter of a tower: 0 before the blocks, i + 1 of block i, the last of a norm after.

    A head is left out.
    """
    last = len(tower.get_submodule(_LAYERS))  # type: ignore[arg-type]
    names = [name for name, _ in tower.named_parameters() if not name.startswith("head.")]
    numbers = {name: 0 if name.startswith(_BEFORE_LAYERS) else last for name in names}
    for name in names:
        if name.startswith(f"{_LAYERS}."):
            numbers[name] = int(name.removeprefix(f"{_LAYERS}.").partition(".")[0]) + 1
    return numbers
