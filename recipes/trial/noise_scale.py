"""Gradient noise scale: the batch size at which the gradient's signal equals its noise.

McCandlish et al. 2018 (arXiv 1812.06162): where G is the true gradient and S the summed variance of one sample's, a
batch of B samples has a squared gradient norm of |G|² + S / B on average. Two sizes of batch give both unknowns;
S / |G|² is the noise scale, in samples. Here the small batches are the micro-batches of a step, and the large one is
the step.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as lightning
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from recipes.lightning_internals import is_accumulating
from recipes.strategy.precision_plugin import get_loss_scale
from recipes.strategy.torch_native import global_norm


@dataclass(frozen=True, kw_only=True)
class StepNorms:
    """Squared gradient norms of one step.

    Attributes:
        small: Mean over its micro-batches.
        large: Squared norm of the whole step.
    """

    small: float
    large: float


class NoiseMeter(Callback):
    """Measures the gradient norm of every micro-batch and of every step, under one device, DDP and FSDP2.

    Gradients are reduced over ranks after every micro-batch instead of once per step: the same sums in another order. A
    copy of the gradients is kept between micro-batches.

    Attributes:
        steps: Norms of the steps so far, without those whose gradients are NaN or inf.
    """

    def __init__(self) -> None:
        self.steps: list[StepNorms] = []
        self._before: dict[str, Tensor] = {}
        self._squares: list[Tensor] = []

    @override
    def on_fit_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        trainer.strategy.block_backward_sync = contextlib.nullcontext  # type: ignore[attr-defined]

    @override
    def on_after_backward(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        grads = {name: p.grad.detach() for name, p in pl_module.named_parameters() if p.grad is not None}
        added = [grad - self._before[name] if name in self._before else grad for name, grad in grads.items()]
        self._squares.append(global_norm(added).square())
        if is_accumulating(trainer):
            self._before = {name: grad.clone() for name, grad in grads.items()}
            return
        count = len(self._squares)
        scale = get_loss_scale(trainer.precision_plugin) or 1.0
        # each micro-batch adds 1 / count of its own mean gradient
        small = float(sum(self._squares[1:], start=self._squares[0])) * count / scale**2  # synchronizes with the device
        large = float(global_norm(list(grads.values())).square()) / scale**2
        self._before, self._squares = {}, []
        if math.isfinite(small) and math.isfinite(large):
            self.steps.append(StepNorms(small=small, large=large))


@dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """An estimate over some steps.

    Attributes:
        samples: The noise scale; inf if no signal was found above the noise.
        standard_error: Jackknife error of `samples` over tenths of the steps; inf if unknown.
        signal: |G|², the squared norm of the true gradient.
        noise: S, the summed variance of the gradient of one sample.
    """

    samples: float
    standard_error: float
    signal: float
    noise: float


def estimate_noise_scale(steps: Sequence[StepNorms], *, small: int, large: int) -> NoiseScale:
    """Return the noise scale of steps whose weights were about the same.

    Args:
        steps: At least one.
        small: Samples of a micro-batch over all ranks.
        large: Samples of a step, more than `small`.
    """
    whole = _estimate(steps, small=small, large=large)
    parts = min(10, len(steps))
    left_out = [
        _estimate([step for i, step in enumerate(steps) if i % parts != part], small=small, large=large).samples
        for part in range(parts)
        if parts > 1
    ]
    error = math.inf
    if left_out and all(map(math.isfinite, left_out)):
        mean = sum(left_out) / parts
        error = math.sqrt((parts - 1) / parts * sum((value - mean) ** 2 for value in left_out))
    return replace(whole, standard_error=error)


def _estimate(steps: Sequence[StepNorms], *, small: int, large: int) -> NoiseScale:
    mean_small = sum(step.small for step in steps) / len(steps)
    mean_large = sum(step.large for step in steps) / len(steps)
    # both are unbiased; their ratio is not, but averaging before dividing keeps the bias small
    signal = (large * mean_large - small * mean_small) / (large - small)
    noise = (mean_small - mean_large) / (1 / small - 1 / large)
    samples = max(noise, 0.0) / signal if signal > 0 else math.inf
    return NoiseScale(samples=samples, standard_error=math.inf, signal=signal, noise=noise)
