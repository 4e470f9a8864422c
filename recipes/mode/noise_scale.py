"""Measure the gradient noise scale over a short run, and advise on the global batch size."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import lightning.pytorch as lightning
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from recipes.config.resolved import ResolvedRun
from recipes.config.traits import declare_mode
from recipes.errors import ConfigError
from recipes.files import write_atomically
from recipes.lightning_internals import is_accumulating, sync_every_micro_batch
from recipes.mode.about import describe_command
from recipes.run_folder import claim_output, has_keys, is_page
from recipes.runtime.console import LOGGER
from recipes.runtime.world import global_rank
from recipes.strategy.precision_plugin import get_loss_scale
from recipes.strategy.torch_native import global_norm
from recipes.trial.steps import take_steps

# Gradient noise scale: the batch size at which the gradient's signal equals its noise.
#
# McCandlish et al. 2018 (arXiv 1812.06162): where G is the true gradient and S the summed variance of one sample's, a
# batch of B samples has a squared gradient norm of |G|² + S / B on average. Two sizes of batch give both unknowns;
# S / |G|² is the noise scale, in samples. Here the small batches are the micro-batches of a step, and the large one is
# the step.


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
        sync_every_micro_batch(trainer)

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


_NUM_WINDOWS = 5
_FEWEST_MICRO_BATCHES = 4  # unless the micro-batch is set: smaller ones separate noise from signal in fewer steps


@declare_mode(takes_steps=True, reads_data=True, reads_micro_batches=True)
def noise_scale(
    resolved: ResolvedRun, *, num_steps: Annotated[int, ">= 10"], path: str | None, write_page: Callable[..., None]
) -> int:
    """Train some steps, from initial weights or a checkpoint, and print the noise scale along the way.

    Args:
        resolved: The run.
        num_steps: Optimizer steps to take.
        path: Folder for `noise_scale.json` and `noise_scale.html`; None only prints.
        write_page: (file, title, lines, figures) -> writes the page; it is also given `about`, of this command.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: The strategy does not expose gradients, or no micro-batch is smaller than the global batch,
            or `path` cannot be written to.
    """
    split = _with_micro_batches(resolved)
    if resolved.strategy.state_layout == "zero":
        raise ConfigError(
            f"{resolved.strategy.typed} mode=noise_scale",
            "DeepSpeed does not expose per-micro-batch gradients; the noise scale depends only on model and data",
            "strategy=fsdp, or strategy=ddp",
        )
    written = {"noise_scale.json": has_keys("noise_scale", "windows"), "noise_scale.html": is_page}
    folder = None if path is None else claim_output(path, "mode.path", replaces=written)
    meter = NoiseMeter()
    run = take_steps(split, num_steps=num_steps, callbacks=[meter])
    large = run.accumulation.global_batch_size
    small = large // run.accumulation.num_micro_batches
    windows = _windows(meter.steps, small=small, large=large)
    lines = describe(windows, global_batch_size=large, num_steps=num_steps, small=small)
    for line in lines:
        LOGGER.info(line)
    if folder is not None and global_rank() == 0:
        _write(folder, windows, lines, partial(write_page, about=describe_command(resolved)))
    return 0


def _with_micro_batches(resolved: ResolvedRun) -> ResolvedRun:
    """Return the run with at least two micro-batches per step, unless they are set explicitly."""
    batch, num_ranks, size = resolved.global_batch_size, resolved.num_data_ranks, resolved.micro_batch_size
    per_rank = batch // num_ranks
    if (size is not None and size < per_rank) or resolved.accumulate_grad_batches not in (None, 1):
        return resolved
    if per_rank < 2 or batch % num_ranks:
        raise ConfigError(
            f"global_batch_size={batch} mode=noise_scale",
            f"{num_ranks} rank{'s' if num_ranks > 1 else ''} cannot split it into smaller batches to compare it with",
            f"global_batch_size={4 * num_ranks}, or more",
        )
    divisors = [d for d in range(1, per_rank) if per_rank % d == 0]
    chosen = max((d for d in divisors if per_rank // d >= _FEWEST_MICRO_BATCHES), default=max(divisors))
    return resolved.with_settings({"micro_batch_size": chosen, "trainer.accumulate_grad_batches": None})


def _windows(steps: Sequence[StepNorms], *, small: int, large: int) -> list[tuple[int, NoiseScale]]:
    """Return the last step and the noise scale of each of a few equal windows of the run."""
    length = max(len(steps) // _NUM_WINDOWS, 1)
    ends = range(len(steps), 0, -length)
    found = [
        (end, estimate_noise_scale(steps[max(0, end - length) : end], small=small, large=large))
        for end in list(ends)[:_NUM_WINDOWS]
    ]
    return found[::-1]


def describe(
    windows: Sequence[tuple[int, NoiseScale]], *, global_batch_size: int, num_steps: int, small: int
) -> list[str]:
    """Summarize the noise scale as lines of text.

    Args:
        windows: Last step and estimate of each window of the run.
        global_batch_size: Global batch size of the run.
        num_steps: Optimizer steps taken.
        small: Samples of a micro-batch over all ranks.
    """
    if not windows:
        return [f"noise_scale: no step of {num_steps} had finite gradients; mode=preflight looks for the reason"]
    lines = [
        f"noise_scale: {num_steps} steps of {global_batch_size} samples, compared with their micro-batches of {small}"
    ]
    for step, found in windows:
        lines.append(f"  up to step {step:>5}: {_samples(found)}")
    last = windows[-1][1].samples
    if not math.isfinite(last) or last <= 0:
        lines.append(
            "more steps or a larger global batch are needed to distinguish the gradient from its noise: mode.num_steps="
        )
        return lines
    lines.append(f"what a global batch costs, based on the last estimate ({last:,.0f} samples):")
    lines.append("  samples per step   steps needed   samples needed   (1 = the fewest possible)")
    for factor in (0.25, 0.5, 1, 2, 4):
        batch = max(round(global_batch_size * factor), 1)
        mark = "  this run" if factor == 1 else ""
        lines.append(f"  {batch:>16,} {1 + last / batch:>14.2f} {1 + batch / last:>16.2f}{mark}")
    if windows[-1][1].standard_error > last / 2:
        lines.append("the last estimate is rough: use more steps for a better one, mode.num_steps=<more>")
    else:
        lines.append(_advice(last, global_batch_size))
    return lines


def _samples(found: NoiseScale) -> str:
    if not math.isfinite(found.samples):
        return "the gradient is indistinguishable from its noise"
    error = f" ± {found.standard_error:,.0f}" if math.isfinite(found.standard_error) else ""
    return f"{found.samples:,.0f}{error} samples"


def _advice(noise: float, batch: int) -> str:
    if batch < noise / 4:
        return (
            "the batch is far below the noise scale: one twice as large needs nearly half the steps; raise the learning"
            " rate with it (lr_scaling=sqrt for Adam)"
        )
    if batch > 4 * noise:
        return "the batch is far above the noise scale: a smaller one reaches the same loss with fewer samples"
    return "the batch is near the noise scale, where neither steps nor samples are wasted"


def _write(
    folder: Path, windows: Sequence[tuple[int, NoiseScale]], lines: list[str], write_page: Callable[..., None]
) -> None:
    finite = [
        {"step": step} | {k: v if math.isfinite(v) else None for k, v in asdict(w).items()} for step, w in windows
    ]
    record: dict[str, Any] = {"noise_scale": finite[-1]["samples"] if finite else None, "windows": finite}
    write_atomically(folder / "noise_scale.json", json.dumps(record, indent=2) + "\n")
    figure = {
        "title": "gradient noise scale in samples, by step",
        "lines": {"noise scale": [(step, found.samples) for step, found in windows]},
        "marks": {},
    }
    page = folder / "noise_scale.html"
    write_page(page, "Gradient noise scale", lines, [figure])
    LOGGER.info(str(page))
