"""Tokens/s and MFU of recipes, checked against a hand-timed PyTorch loop and an independent clock."""

import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from callbacks.throughput.peak_flops import get_peak
from gpu_checks.callbacks import StepClock
from gpu_checks.check import Outcome, Settings, Skip, judge
from gpu_checks.rank_cases import only_installed
from gpu_checks.runs import BARE, QUIET, TINY_GPT2, TINY_IMAGES, fit_here, run_train
from recipes.run_folder import METRICS_FILE, PLAN_FILE, SUMMARY_FILE, read_rows

sys.path.append(str(Path(__file__).parents[1]))

from plain_gpt2 import train as train_by_hand

Shape = tuple[int, int, int, int, int]  # padded vocabulary size, sequence length, layers, heads, channels
GPT2_124M: Shape = (50304, 1024, 12, 12, 768)
TINY: Shape = (64, 16, 2, 2, 32)
# GiB of activations per sample of 1024 tokens, eager, in bfloat16; GiB of weights, gradients and optimizer state. The
# hand-written loop needs more than the recipe: its cross-entropy copies the logits to float32.
_GPT2_GIB = (1.4, 2.0)
_CLOCK_TOLERANCE = 0.03  # between SpeedMonitor and a second clock in the same run
_LEAST_OF_BY_HAND = 0.9  # relative to the hand-written loop, which logs, checks and saves nothing
_FLOP_TOLERANCE = 1e-3  # both counts include norms, biases and positions
_LOG_EVERY = 10


def mfu(settings: Settings) -> Outcome:
    """Time GPT-2 124M in bfloat16 by hand, then as a recipe with SpeedMonitor and an independent clock."""
    shape = TINY if settings.is_tiny else GPT2_124M
    batch = 4 if settings.is_tiny else fit_micro_batch(settings, 48, *_GPT2_GIB)
    flops = count_flops(shape)
    by_hand = median(time_by_hand(settings, shape, batch))
    found = _train_recipe(settings, batch)
    tokens = batch * shape[1]
    figures = found | {
        "micro_batch_size": batch,
        "flops_per_token": flops,
        "flops_per_token_of_the_recipe": found["flops_per_step"] / tokens,
        "step_seconds_by_hand": by_hand,
        "tokens_per_second_by_hand": tokens / by_hand,
        "tokens_per_second": tokens / found["step_seconds"],
        "recipe_over_by_hand": by_hand / found["step_seconds"],
    }
    peak = _get_peak_tflops(settings)
    figures["peak_tflops"] = peak
    figures["mfu_by_hand"] = None if peak is None else flops * tokens / by_hand / peak / 1e12
    headline = f"{1000 * found['step_seconds']:.0f} ms, {tokens / found['step_seconds']:,.0f} tokens/s"
    if found["mfu"] is not None:
        headline += f", MFU {found['mfu']:.3f}, by hand {figures['mfu_by_hand']:.3f}"
    note = "" if peak is not None else "no MFU: no peak is published for this device"
    return judge(
        find_disagreements(figures, judges_speed=not settings.is_tiny), headline=headline, figures=figures, note=note
    )


def find_disagreements(figures: dict[str, Any], *, judges_speed: bool) -> list[str]:
    """Return a sentence for each pair of figures that should agree but does not.

    Args:
        figures: Figures from `mfu`.
        judges_speed: Whether to compare times as well as the FLOP count.
    """
    failures = []
    counted = figures["flops_per_token_of_the_recipe"] / figures["flops_per_token"]
    if abs(counted - 1) > _FLOP_TOLERANCE:
        failures.append(f"SpeedMonitor counts {counted:.4f} of the FLOPs of 6 N + 12 L C T")
    if not judges_speed:
        return failures
    clocks = figures["step_seconds"] / figures["step_seconds_by_clock"]
    if abs(clocks - 1) > _CLOCK_TOLERANCE:
        failures.append(f"a step takes {clocks:.3f} of a second clock's time by SpeedMonitor")
    if figures["recipe_over_by_hand"] < _LEAST_OF_BY_HAND:
        failures.append(f"the recipe reaches {figures['recipe_over_by_hand']:.3f} of the hand-written loop's speed")
    return failures


def count_flops(shape: Shape) -> float:
    """Return forward and backward FLOPs per token of GPT-2 by PaLM's 6 N + 12 L C T, computed independently."""
    vocab, length, layers, _, channels = shape
    # per block: 4 C^2 in attention, 8 C^2 in the MLP, 9 C in biases, 4 C in norms
    block = 12 * channels**2 + 13 * channels
    num_parameters = vocab * channels + length * channels + layers * block + 2 * channels
    return 6.0 * num_parameters + 12.0 * layers * channels * length


def time_by_hand(settings: Settings, shape: Shape, batch: int) -> list[float]:
    """Return the seconds of the hand-written loop's steady-state steps; uses CUDA events on a GPU."""
    steps, skipped = (8, 3) if settings.is_tiny else (30, 10)
    device = "cuda" if settings.accelerator == "gpu" else "cpu"
    # compiled under the same condition as the recipe: with compile=auto, on a GPU
    loop = train_by_hand(shape, batch=batch, steps=steps, bf16=True, compile_=device == "cuda", device=device)
    seconds = list(_time_each(loop, on_gpu=device == "cuda"))
    del loop
    torch._dynamo.reset()  # its cache keeps the weights and the optimizer state of the compiled loop
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()  # the recipe needs the memory
    return seconds[skipped:]


def _time_each(loop: Iterator[float], *, on_gpu: bool) -> Iterator[float]:
    while True:
        began = time.perf_counter()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in "ab") if on_gpu else (None, None)
        if first is not None:
            first.record()
        if next(loop, None) is None:
            return
        if last is None or first is None:
            yield time.perf_counter() - began
        else:
            last.record()
            last.synchronize()
            yield first.elapsed_time(last) / 1000


def _train_recipe(settings: Settings, batch: int) -> dict[str, Any]:
    """Train the README's recipe with its default callbacks; return medians over windows of ten steps."""
    model = TINY_GPT2 if settings.is_tiny else ["model=gpt2"]
    overrides = ["recipe=single_bf16", *model, *QUIET, *settings.on_one_device, f"global_batch_size={batch}"]
    overrides += [f"log_every={_LOG_EVERY}", f"trainer.max_steps={5 * _LOG_EVERY + 1}"]
    clock = StepClock(every=_LOG_EVERY)
    left_over = torch.cuda.memory_allocated() if settings.accelerator == "gpu" else 0
    run = fit_here(settings, "recipe", overrides, [clock])
    rows = {int(row["step"]): row for row in read_rows(run.folder / METRICS_FILE)}
    windows = [step for step in sorted(clock.step_seconds) if step > _LOG_EVERY]  # without the window of step 1
    assert len(windows) == 4, f"windows end at {windows}"

    def of_windows(name: str) -> float | None:
        values = [rows[step][name] for step in windows if name in rows[step]]
        return median(values) if values else None

    return {
        "step_seconds": of_windows("time/step_seconds"),
        "step_seconds_by_clock": median(clock.step_seconds[step] for step in windows),
        "flops_per_step": median(
            1e12 * rows[step]["throughput/tflops"] * rows[step]["time/step_seconds"] for step in windows
        ),
        "mfu": of_windows("throughput/mfu"),
        "mfu_causal": of_windows("throughput/mfu_causal"),
        "data_wait_fraction": of_windows("time/data_wait_fraction"),
        "allocated_peak_gib": of_windows("memory/allocated_peak_gib"),
        "allocated_before_gib": left_over / 2**30,
    }


def throughput(
    settings: Settings,
    *,
    overrides: Sequence[str],
    micro_batch_size: int,
    sample_gib: float,
    state_gib: float,
    num_gpus: int = 1,
    takes_images: bool = False,
) -> Outcome:
    """Train a recipe from its command and return its speed in tokens or images per second.

    Args:
        settings: Settings of the check.
        overrides: Overrides, as typed.
        micro_batch_size: Size that fits into 80 GB.
        sample_gib: Activation memory per sample, used to reduce the micro-batch on smaller devices.
        state_gib: Memory for weights, gradients and optimizer state.
        num_gpus: Number of GPUs; 0 uses all, and requires at least two.
        takes_images: Whether the model takes images, not tokens.

    Raises:
        Skip: There are too few GPUs, or DeepSpeed is not installed.
    """
    if num_gpus == 0 and settings.num_gpus < 2:
        raise Skip(f"needs two GPUs; this machine has {settings.num_gpus}")
    if any("zero" in word for word in overrides) and not only_installed(["ZeRO-1"]):
        raise Skip("DeepSpeed is not installed")
    count = num_gpus or settings.num_gpus
    micro = 4 if settings.is_tiny else fit_micro_batch(settings, micro_batch_size, sample_gib, state_gib)
    steps = 20 if settings.is_tiny else 50
    tiny = TINY_IMAGES if takes_images else TINY_GPT2
    typed = [*overrides, *(tiny if settings.is_tiny else [])]
    typed += [f"micro_batch_size={micro}", f"global_batch_size={micro * count}"]
    also = [
        *(BARE if takes_images else QUIET),
        f"trainer.accelerator={settings.accelerator}",
        f"trainer.devices={count}",
        f"log_every={_LOG_EVERY}",
    ]
    also.append(f"trainer.max_steps={steps + 1}")
    ended = run_train(settings, "run", [*typed, *also], limit_seconds=settings.limit(580.0))
    if ended.code:
        return judge([f"exit code {ended.code}: {ended.output[-800:]}"], headline="", figures={"typed": typed})
    rows = [row for row in read_rows(ended.folder / METRICS_FILE) if _LOG_EVERY < row["step"] <= steps]
    per_second = "samples_per_second" if takes_images else "tokens_per_second"
    names = (f"throughput/{per_second}", "throughput/mfu", "throughput/mfu_causal", "time/step_seconds")
    figures: dict[str, Any] = {"typed": " ".join(typed), "micro_batch_size": micro}
    for name in (*names, "memory/allocated_peak_gib", "time/data_wait_fraction"):
        values = [row[name] for row in rows if name in row]
        figures[name.partition("/")[2]] = median(values) if values else None
    figures["seconds_until_the_end"] = round(ended.seconds, 1)
    figures |= _plan(settings, [*typed, *also])
    headline = f"{figures[per_second]:,.0f} {'images' if takes_images else 'tokens'}/s"
    if figures["mfu"] is not None:
        headline += f", MFU {figures['mfu']:.3f}"
    if figures["allocated_peak_gib"] is not None:
        headline += f", {figures['allocated_peak_gib']:.1f} GiB (planned {figures['planned_peak_gib']:.1f})"
    assert (ended.folder / SUMMARY_FILE).is_file()
    return judge([], headline=headline, figures=figures)


def _plan(settings: Settings, overrides: list[str]) -> dict[str, float | None]:
    """Return what `mode=plan` predicts for the same run on this machine; no time for a device without a known peak."""
    folder = settings.folder / "plan"
    where = ["mode=plan", "mode.advise=false", f"mode.path={folder}"]
    planned = run_train(settings, "planned", [*overrides, *where], limit_seconds=settings.limit(120.0))
    assert planned.code == 0, planned.output[-800:]
    plan = json.loads((folder / PLAN_FILE).read_text())
    seconds = plan["step_seconds"] if "step_seconds" in plan else None
    return {"planned_peak_gib": plan["peak_memory_gib"], "planned_step_seconds": seconds}


def fit_micro_batch(settings: Settings, at_most: int, sample_gib: float, state_gib: float) -> int:
    """Return the micro-batch size, halved until it needs at most nine tenths of the memory; 2 on a CPU."""
    if settings.memory_gib is None:
        return 2
    micro = at_most
    while micro > 1 and micro * sample_gib + state_gib > 0.9 * settings.memory_gib:
        micro //= 2
    return micro


def _get_peak_tflops(settings: Settings) -> float | None:
    if settings.accelerator == "cpu":
        return None
    return get_peak(torch.cuda.get_device_name(0), "bf16").tflops
