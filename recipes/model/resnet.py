"""ResNet-18 and ResNet-50 (He et al. 2015, arXiv:1512.03385), in torchvision's variant.

10.9 and 24.5 GFLOP per 224 x 224 image, forward and backward.

Shapes: B images, C channels, H x W pixels, V classes.
"""

import itertools
import math
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.model.flops import Flops, flops_per_weight
from recipes.model.init import constant_, named_parameters, normal_
from recipes.model.norm import InPlaceOfBatchNorm, Norm, replace_batch_norms

STAGE_CHANNELS = (64, 128, 256, 512)  # every stage but the first halves the resolution
HEAD_STD = 0.01  # Goyal et al. 2017, arXiv:1706.02677, section 5.1


def make_shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """Return the identity, or a 1 x 1 convolution with a norm if the shape changes."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
        nn.BatchNorm2d(out_channels),
    )


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with a shortcut.

    Args:
        in_channels: C.
        channels: C'.
        stride: Of the first convolution.
    """

    EXPANSION: ClassVar[int] = 1

    def __init__(self, *, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = make_shortcut(in_channels, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C', H / stride, W / stride]"""
        branch = F.relu(self.norm1(self.conv1(x)))
        branch = self.norm2(self.conv2(branch))
        return F.relu(branch + self.shortcut(x))


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1 with a shortcut; the last one quadruples the channels.

    Args:
        in_channels: C.
        channels: C', of the first two convolutions.
        stride: Of the 3 x 3 convolution, as in torchvision; the paper has it in the first one.
    """

    EXPANSION: ClassVar[int] = 4

    def __init__(self, *, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        out_channels = self.EXPANSION * channels
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, out_channels, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(out_channels)
        self.shortcut = make_shortcut(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, 4 C', H / stride, W / stride]"""
        branch = F.relu(self.norm1(self.conv1(x)))
        branch = F.relu(self.norm2(self.conv2(branch)))
        branch = self.norm3(self.conv3(branch))
        return F.relu(branch + self.shortcut(x))


class ResNet(nn.Module):
    """Residual convolutional classifier; loads torchvision's published weights.

    Args:
        num_classes: V, classes, labels or numbers.
        in_channels: C; 1: gray, 3: color.
        small_images: 3 x 3 stem without pooling, for images of 8 to 64 pixels; False: 7 x 7, stride 2, max-pool.
        pretrained: A .safetensors or .pth file with torchvision's names; None: `init_weights`.
        norm: What normalizes in the place of batch norm, see `recipes.model.norm`.
    """

    input_kind: ClassVar[str] = "images"
    published_format: ClassVar[str] = "torchvision"
    free_at_resume: ClassVar[tuple[str, ...]] = ("norm",)  # batch, sync and frozen have the same weights
    new_head_with: ClassVar[tuple[str, ...]] = ("num_classes",)  # start_from= may change it
    batch_norm_stride: ClassVar[int] = 8  # pixels per value of the last norm, with small_images; otherwise 32
    BLOCK: ClassVar[type[ResidualBlock | Bottleneck]]
    STAGE_BLOCKS: ClassVar[tuple[int, ...]]  # blocks in each stage

    def __init__(
        self,
        *,
        num_classes: Annotated[int, ">= 1"],
        in_channels: Annotated[int, ">= 1"],
        small_images: bool,
        pretrained: str | None = None,
        norm: Norm = "batch",
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.in_channels = in_channels
        self.small_images = small_images
        self.pretrained = pretrained
        size, stride = (3, 1) if small_images else (7, 2)
        self.stem_conv = nn.Conv2d(in_channels, STAGE_CHANNELS[0], size, stride=stride, padding=size // 2, bias=False)
        self.stem_norm = nn.BatchNorm2d(STAGE_CHANNELS[0])
        self.blocks = nn.ModuleList()
        in_channels = STAGE_CHANNELS[0]
        for stage, (channels, num_blocks) in enumerate(zip(STAGE_CHANNELS, self.STAGE_BLOCKS, strict=True)):
            for index in range(num_blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                self.blocks.append(self.BLOCK(in_channels=in_channels, channels=channels, stride=stride))
                in_channels = self.BLOCK.EXPANSION * channels
        self.head = nn.Linear(in_channels, num_classes)
        replace_batch_norms(self, norm)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] float -> logits [B, V] in the compute dtype."""
        x = F.relu(self.stem_norm(self.stem_conv(images)))  # [B, 64, H, W] or [B, 64, H / 2, W / 2]
        if not self.small_images:
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        for block in self.blocks:
            x = block(x)  # finally [B, 512, H', W'], of ResNet-50 [B, 2048, H', W']
        logits: Tensor = self.head(x.mean(dim=(2, 3)))  # [B, V]
        return logits

    def init_weights(self, seed: int) -> None:
        """Initialize every parameter and buffer in place, from (seed, name, shape).

        Convolutions normal with standard deviation sqrt(2 / fan_out) (He et al. 2015, arXiv:1502.01852); the last norm
        of each block 0, so that blocks start as identities (Goyal et al. 2017), other norms 1; head normal with 0.01;
        biases 0.
        """
        last_norm = "norm3.weight" if self.BLOCK is Bottleneck else "norm2.weight"
        for name, parameter in named_parameters(self):
            if parameter.dim() == 4:
                fan_out = parameter.shape[0] * parameter.shape[2] * parameter.shape[3]
                normal_(parameter, name=name, seed=seed, std=math.sqrt(2.0 / fan_out))
            elif name == "head.weight":
                normal_(parameter, name=name, seed=seed, std=HEAD_STD)
            else:
                zero = name.endswith(("bias", last_norm))
                constant_(parameter, 0.0 if zero else 1.0)
        self.init_buffers()

    @torch.no_grad()
    def init_buffers(self) -> None:
        """Set running means to 0, variances to 1, counts to 0."""
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d | InPlaceOfBatchNorm):
                module.reset_running_stats()

    def flops_per_sample(self, image_size: int) -> Flops:
        """Return the FLOPs per trained image of `image_size` squared pixels: six per multiply-add if all is trained.

        Counts convolutions and head only; without attention, both conventions agree.
        """
        size = image_size if self.small_images else -(-image_size // 2)
        per_weight = flops_per_weight(self)
        flops = per_weight[self.stem_conv.weight] * self.stem_conv.weight.numel() * size**2
        size = size if self.small_images else -(-size // 2)  # max-pool
        for block in self.blocks:
            assert isinstance(block, ResidualBlock | Bottleneck)
            out_size = -(-size // block.stride)
            for name, child in block.named_children():
                for module in child.modules():
                    if isinstance(module, nn.Conv2d):
                        # a bottleneck's first convolution comes before its stride
                        is_before = name == "conv1" and module.stride == (1, 1)
                        num_uses = module.weight.numel() * (size if is_before else out_size) ** 2
                        flops += per_weight[module.weight] * num_uses
            size = out_size
        flops += per_weight[self.head.weight] * self.head.weight.numel()
        return Flops(palm=flops, causal=flops)

    @classmethod
    def find_block(cls, stage: int, index: int) -> int:
        """Return the position in `blocks` of a block of a stage, both counted from 0."""
        return [0, *itertools.accumulate(cls.STAGE_BLOCKS)][stage] + index


class ResNet18(ResNet):
    """ResNet-18: two blocks of two convolutions per stage."""

    BLOCK = ResidualBlock
    STAGE_BLOCKS = (2, 2, 2, 2)


class ResNet50(ResNet):
    """ResNet-50: 3, 4, 6 and 3 bottlenecks."""

    BLOCK = Bottleneck
    STAGE_BLOCKS = (3, 4, 6, 3)
