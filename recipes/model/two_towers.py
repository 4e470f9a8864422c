"""A tower of images and a tower of text, whose features are compared: CLIP (arXiv:2103.00020), SigLIP (2303.15343).

The similarity of an image and a caption is the cosine of their features, times a scale that is learned, plus a bias
that a model of the sigmoid loss learns. Losses compute it, of a whole global batch; a model returns what it takes.

Shapes: B pairs, C channels, S pixels a side, T tokens, F numbers of a feature.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from recipes.model.flops import Flops, attention_flops, count_training

_LARGEST_SCALE = 100.0  # of CLIP, section 2.5; SigLIP has no bounds, and published ones have learned 112 and more


class TwoTowers(nn.Module, ABC):
    """Images [B, C, S, S] float and captions [B, T] -> features, scale and bias.

    The logarithm of the scale and the bias are parameters of shape [1], as engines shard the first axis.

    Attributes:
        title: Name of the architecture.
        vocab_size: Number of tokens.
        max_seq_len: T; captions are padded to it.
        image_size: S.
        in_channels: C.
        projection_size: F.
    """

    input_kind: ClassVar[str] = "images_and_text"
    title: str
    vocab_size: int
    max_seq_len: int
    image_size: int
    in_channels: int
    projection_size: int

    def forward(
        self, images: Tensor | None, tokens: Tensor | None, is_token: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
        """Return features, the logarithm of the scale, and the bias.

        Args:
            images: [B, C, S, S] float; None: only captions are read.
            tokens: [B, T] int64; None: only images are read.
            is_token: [B, T] bool, False for the padding that ends a caption; None beside no tokens.

        Returns:
            Features of images [B, F] and of captions [B, F] in the compute dtype, not normalized, None for what was not
            given; the logarithm of the scale [1]; the bias [1], 0 in a model without.
        """
        of_images = None if images is None else self.encode_images(images)
        of_captions = None if tokens is None else self.encode_captions(tokens, is_token)
        log_scale, bias = self.scalars()
        # copies: engines free gathered weights after the forward pass
        of_bias = torch.zeros_like(log_scale) if bias is None else bias * 1.0  # [1]
        return of_images, of_captions, log_scale * 1.0, of_bias

    @abstractmethod
    def encode_images(self, images: Tensor) -> Tensor:
        """Images [B, C, S, S] -> features [B, F]."""

    @abstractmethod
    def encode_captions(self, tokens: Tensor, is_token: Tensor | None) -> Tensor:
        """Captions [B, T], and which of their tokens are no padding [B, T] -> features [B, F]."""

    @abstractmethod
    def scalars(self) -> tuple[nn.Parameter, nn.Parameter | None]:
        """Return the logarithm of the scale, [1], and the bias, [1]; None: there is none."""

    @abstractmethod
    def text_tower(self) -> tuple[nn.Module, int]:
        """Return the tower of text, and the width of attention in each of its blocks if it is causal, else 0."""

    @abstractmethod
    def number_towers(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Return the layer of each parameter of the tower of images, and of that of text, from 0 at the inputs."""

    def bounds(self) -> dict[str, tuple[float, float]]:
        """Return the least and largest value that parameters may have after a step, by name.

        The scale of a model without a bias, whose loss is a softmax, is from 1 to 100: more would make training
        unstable (CLIP, section 2.5).
        """
        log_scale, bias = self.scalars()
        names = [name for name, parameter in self.named_parameters() if parameter is log_scale]
        return {} if bias is not None else dict.fromkeys(names, (0.0, math.log(_LARGEST_SCALE)))

    def number_layers(self) -> dict[str, int]:
        """Return the layer of each parameter for layer-wise decay: both towers end in the one before the last.

        The last one has heads, projections, scale and bias.
        """
        towers = self.number_towers()
        lasts = [max(tower.values()) for tower in towers]
        numbers = {name: max(lasts) + 1 for name, _ in self.named_parameters()}
        for tower, last in zip(towers, lasts, strict=True):
            numbers |= {name: number + max(lasts) - last for name, number in tower.items()}
        return numbers

    def flops_per_sample(self, image_size: int) -> Flops | None:
        """Return the FLOPs of a trained pair, both towers; None if the model is not on the meta device.

        Args:
            image_size: S.
        """
        first = next(self.parameters())
        if not first.is_meta:
            return None
        size = 2  # batch statistics of one sample have no variance
        images = torch.empty(size, self.in_channels, image_size, image_size, dtype=first.dtype, device="meta")
        tokens = torch.empty(size, self.max_seq_len, dtype=torch.int64, device="meta")  # [2, T]
        total = count_training(self, images, tokens, torch.empty_like(tokens, dtype=torch.bool)) / size
        tower, width = self.text_tower()
        attention = attention_flops(tower, width=width, seq_len=self.max_seq_len) * self.max_seq_len
        return Flops(palm=total, causal=total - attention / 2)
