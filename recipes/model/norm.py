"""What stands in the place of batch norm (Ioffe and Szegedy 2015, arXiv:1502.03167) in a model of images.

Batch norm computes with the mean and variance of a micro-batch on one device, so that accumulation and more ranks
change what is trained: gradients are summed over a step, and these statistics are not. Here are three ways out:
statistics over all data-parallel ranks, statistics of groups of channels of one sample, and statistics that stay as
they are. Parameters and buffers keep their names, so that published weights fit.

Shapes: B images of this rank, C channels, … further axes of one size on every rank, R ranks, N = R B … values.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from recipes.errors import ConfigError
from recipes.numerics.collectives import gather_parts, reduce_parts

Norm = Literal["batch", "sync", "group", "frozen"]
_MOST_GROUPS = 32  # Wu and He 2018, arXiv:1803.08494


def replace_batch_norms(model: nn.Module, norm: Norm) -> None:
    """Put another norm in the place of every batch norm of a model, with its parameters, in place.

    Args:
        model: Model on any device.
        norm: `batch` changes nothing; `sync` takes the statistics of all data-parallel ranks; `group` those of groups
            of channels of one sample; `frozen` those of the weights that the model starts from. Weights and biases of
            the norms are trained under each of them, unless `freeze` names them.

    Raises:
        ConfigError: The model has no batch norm to replace.
    """
    if norm == "batch":
        return
    found = list_batch_norms(model)
    if not found:
        name = getattr(model, "title", type(model).__name__)
        raise ConfigError(f"model.norm={norm}", f"{name} has no batch norm to replace", "model.norm=batch")
    made: dict[str, type[InPlaceOfBatchNorm]] = {"sync": SyncNorm, "group": GroupNorm, "frozen": FrozenNorm}
    for name, old in found.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, made[norm](old))


def list_batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return the batch norms of a model by name, of torch's classes and those derived from them."""
    return {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}


def join_ranks(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Let the norms of `model.norm=sync` compute over the ranks of a group; None: all ranks, if there are several."""
    several = dist.is_initialized() and dist.get_world_size(group) > 1
    for module in model.modules():
        if isinstance(module, SyncNorm):
            module.ranks = (group or dist.group.WORLD) if several else None


def describe_ghosts(model: nn.Module, *, micro_batch_size: int, num_ranks: int, global_batch_size: int) -> str | None:
    """Return whose statistics batch norms compute with if not with those of a whole step, and what to type.

    Args:
        model: Model, sharded or not.
        micro_batch_size: Samples per forward pass of a rank.
        num_ranks: Data-parallel ranks.
        global_batch_size: Samples of a step.

    Returns:
        One line; None: the model has no batch norm that is trained, or the statistics are those of the step.
    """
    is_synced = any(isinstance(module, SyncNorm) for module in model.modules())
    num_samples = micro_batch_size * (num_ranks if is_synced else 1)
    if num_samples == global_batch_size or not (is_synced or list_batch_norms(model)):
        return None
    ways = [] if is_synced or num_ranks == 1 else ["model.norm=sync takes those of all ranks"]
    if micro_batch_size * num_ranks < global_batch_size:
        ways.append(f"micro_batch_size={global_batch_size // num_ranks} those of the step on a rank")
    ways.append("model.norm=group none")
    return f"batch norm: statistics of {num_samples} of the {global_batch_size} samples of a step; {', '.join(ways)}"


class InPlaceOfBatchNorm(nn.Module):
    """The parameters of a batch norm, and what its class does after it, such as timm's activation."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.num_features: int = old.num_features
        self.eps: float = old.eps
        self.momentum: float | None = old.momentum
        self.register_parameter("weight", old.weight)
        self.register_parameter("bias", old.bias)
        for name, buffer in self._choose_buffers(old):
            self.register_buffer(name, buffer)
        for name in ("drop", "act"):  # of timm's BatchNormAct2d, in this order
            if hasattr(old, name):
                self.add_module(name, getattr(old, name))
        self.train(old.training)

    def _choose_buffers(self, old: Any) -> Iterator[tuple[str, Tensor]]:
        yield from old.named_buffers(recurse=False)

    def reset_running_stats(self) -> None:
        """Set running means to 0, variances to 1 and the count to 0, where there are any."""
        for name, buffer in self.named_buffers(recurse=False):
            buffer.fill_(1 if name == "running_var" else 0)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[B, C, …] -> [B, C, …] in the dtype of x."""
        x = self.normalize(x)
        for part in self.children():
            x = part(x)
        return x

    def normalize(self, x: Tensor) -> Tensor:
        """[B, C, …] -> [B, C, …]"""
        raise NotImplementedError

    def _apply_running(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)

    @override
    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}"


class FrozenNorm(InPlaceOfBatchNorm):
    """Normalizes with the running statistics in training, too, and never changes them."""

    @override
    def normalize(self, x: Tensor) -> Tensor:
        return self._apply_running(x)


class GroupNorm(InPlaceOfBatchNorm):
    """Normalizes 32 groups of channels of each sample, or the most below that which divide C; it has no statistics."""

    @override
    def _choose_buffers(self, old: Any) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    @override
    def normalize(self, x: Tensor) -> Tensor:
        groups = next(number for number in range(_MOST_GROUPS, 0, -1) if self.num_features % number == 0)
        return F.group_norm(x, groups, self.weight, self.bias, self.eps)


class SyncNorm(InPlaceOfBatchNorm):
    """Batch norm over the micro-batches of all ranks: an all-gather of 2 C numbers forward, an all-reduce backward.

    torch's `SyncBatchNorm` (2.13) does the same on GPUs only. Without a process group it is batch norm.

    Attributes:
        ranks: Process group of the ranks; None: this one alone.
    """

    ranks: dist.ProcessGroup | None = None

    @override
    def normalize(self, x: Tensor) -> Tensor:
        if not self.training:
            return self._apply_running(x)
        normalized, mean, variance = _Normalize.apply(x, self.weight, self.bias, self.eps, self.ranks)
        num_values = x.numel() // self.num_features * (1 if self.ranks is None else self.ranks.size())  # N
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            share = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked
            unbiased = variance * (num_values / max(num_values - 1, 1))
            self.running_mean.add_(share * (mean.to(self.running_mean.dtype) - self.running_mean))
            self.running_var.add_(share * (unbiased.to(self.running_var.dtype) - self.running_var))
        out: Tensor = normalized
        return out


class _Normalize(torch.autograd.Function):
    """`apply(x, weight, bias, eps, ranks)` -> [B, C, …], mean and variance over N values, [C] each.

    Statistics are computed in float32 at least. The gradient of x is that of one device with the samples of all ranks;
    those of weight and bias are of this rank's samples, as the engine sums them.
    """

    @staticmethod
    @override
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, ranks: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        axes = [axis for axis in range(x.ndim) if axis != 1]
        exact = x if x.dtype == torch.float64 else x.float()
        variance, mean = torch.var_mean(exact, axes, correction=0)  # [C] each
        if ranks is not None:
            # not sums of x and of its square, whose difference would cancel
            parts = gather_parts(torch.stack([mean, variance])[None], ranks, dim=0)  # [R, 2, C]
            mean = parts[:, 0].mean(0)
            variance = (parts[:, 1] + (parts[:, 0] - mean).square()).mean(0)
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.eps, ctx.ranks, ctx.axes = eps, ranks, axes
        ctx.bias_dtype = None if bias is None else bias.dtype
        # torch takes weights in the dtype of the statistics, or all three in that of x
        gain, shift = (None if part is None else part.to(mean.dtype) for part in (weight, bias))
        normalized = F.batch_norm(x, mean, variance, gain, shift, eps=eps)
        ctx.mark_non_differentiable(mean, variance)
        return normalized, mean, variance

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight, mean, variance = ctx.saved_tensors
        wide = [1, -1] + [1] * (x.ndim - 2)
        inverse = (variance + ctx.eps).rsqrt()  # [C]
        exact = grad.to(mean.dtype)
        standard = (x.to(mean.dtype) - mean.view(wide)) * inverse.view(wide)  # [B, C, …]
        of_bias, of_weight = exact.sum(ctx.axes), (exact * standard).sum(ctx.axes)  # [C] each
        sums, num_values = torch.stack([of_bias, of_weight]), x.numel() // x.shape[1]
        if ctx.ranks is not None:
            sums = reduce_parts(sums, ctx.ranks)
            num_values *= ctx.ranks.size()
        means = sums / num_values
        scale = inverse if weight is None else inverse * weight
        of_x = scale.view(wide) * (exact - means[0].view(wide) - standard * means[1].view(wide))
        return (
            of_x.to(x.dtype),
            None if weight is None else of_weight.to(weight.dtype),
            None if ctx.bias_dtype is None else of_bias.to(ctx.bias_dtype),
            None,
            None,
        )
