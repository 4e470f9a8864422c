"""Model FLOPs utilization (MFU): the model's FLOP/s as a fraction of the device's peak.

FLOPs are determined once per micro-batch shape, or per key of a module that has `recipes_flops_key`.
"""

import logging
import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from ..protocols import SupportsFlops, SupportsMetaForward
from .flop_counter import (
    FlopCounter,
    are_telling,
    count_flops_on_meta,
    get_shapes,
    has_sharded_parameters,
    is_compiled,
)
from .peak_flops import Kind, get_peak
from .stopwatch import Snapshot

log = logging.getLogger("lightning_recipes")
_KINDS: dict[torch.dtype, Kind] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# by the part of Lightning's precision name before the first dash; "transformer" is from transformer-engine
_KINDS_BY_PRECISION: dict[str, Kind] = {"bf16": "bf16", "16": "fp16", "32": "fp32", "transformer": "fp8"}
_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": torch.float32,
    "fp32": torch.float32,
}
_MAX_SHAPES = 256  # micro-batch shapes whose FLOPs are cached
_MAX_WATCHED = 32  # micro-batches whose operators are counted, which slows each of them down
_NUM_EQUAL = 3  # equal counts after which batches have the same FLOPs although their shapes alone do not tell
_HOW = "define recipes_flops(batch), which returns .palm and .causal"
Flops = tuple[float, float | None]  # attention counted in full; at half for the causal mask, None if unknown


class FlopMeter:
    """Determines the FLOPs of a micro-batch and the peak FLOP/s of the device.

    Args:
        peak_tflops: The device's dense peak in TFLOP/s; None looks it up in the table of published peaks.
        measure_peak: Time a matmul and log the fraction of its rate instead.
    """

    def __init__(self, *, peak_tflops: float | None, measure_peak: bool) -> None:
        self._peak_tflops = peak_tflops
        self._measure_peak = measure_peak
        self._flops: dict[Any, Flops] = {}  # by key and passes
        self._counter: FlopCounter | None = None  # while a micro-batch is being counted
        self._at_optimizer: float | None = None  # FLOPs of that micro-batch before the optimizer step
        self._why_not: str | None = None  # why FLOPs cannot be counted; None if they can
        self._begin()
        self._peak: float | None = None  # TFLOP/s, published or set
        self._measured: float | None = None  # TFLOP/s

    def _begin(self) -> None:
        self._flops.clear()
        self._why_not = None
        self._num_watched = 0
        self._left_out: set[str] = set()  # operators named in a log line
        self._expected: Any = None  # key of the batch as known before its step
        self._counts: dict[Any, list[float]] = {}  # by key, of batches whose shapes alone may not tell
        self._wanted: Any = None  # key and passes of a micro-batch that no one expected, until it is counted
        self._num_backward = 0  # backward passes of the current micro-batch
        self._stepped: list[int] = []  # optimizers that stepped in it
        self._is_slowed = self._rests = False  # whether a micro-batch of this step, of the last one, was counted

    def start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reset all state, determine the peak, and log it or the reason why there is none."""
        self._begin()
        self._peak = self._measured = None
        device, kind = trainer.strategy.root_device, get_kind(trainer, pl_module)
        if self._measure_peak:
            if kind is None or kind == "fp8" or (kind == "fp16" and device.type == "cpu"):
                message = f"no MFU: products of {kind or 'this precision'} are not measured"
            else:
                self._measured = measure_peak_tflops(device, _DTYPES[kind])
                message = f"a matmul in {kind} reaches {self._measured:.4g} TFLOP/s here"
        elif self._peak_tflops is not None:
            self._peak = self._peak_tflops
            message = f"MFU is relative to {self._peak_tflops:g} TFLOP/s, as set by peak_tflops"
        elif kind is None:
            message = "no MFU: the precision of this run has no published peak"
        elif device.type != "cuda":
            return  # has no published peak, and nobody expects one
        else:
            published = get_peak(torch.cuda.get_device_name(device), kind)
            self._peak, message = published.tflops, published.description
        if trainer.is_global_zero:
            has_peak = self._peak is not None or self._measured is not None
            log.log(logging.INFO if has_peak else logging.WARNING, message)

    def needs_watch(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> bool:
        """Return whether the operators of a micro-batch must be counted because its FLOPs are unknown.

        Not in two steps in a row on account of new shapes: with a new shape in every step, none would be left to time.

        Args:
            trainer: The trainer.
            pl_module: The module; not needed if it reports its own FLOPs or can run on the meta device.
            batch: As passed to `on_train_batch_start`: with a `dataloader_iter` it is the previous batch or None.
        """
        if self._why_not is not None or isinstance(pl_module, (SupportsFlops, SupportsMetaForward)):
            return False
        if self._num_watched >= _MAX_WATCHED:
            return False
        self._expected = _get_key(pl_module, batch)
        if self._wanted is None and (self._rests or any(key == self._expected for key, _ in self._flops)):
            return False
        if has_sharded_parameters(pl_module):
            self._give_up(trainer, pl_module, "its parameters are DTensors")
            return False
        return True

    def watch(self) -> None:
        """Start counting the operators of a micro-batch; call it before its forward pass."""
        self._num_watched += 1
        self._is_slowed = True
        self._at_optimizer = None
        self._counter = FlopCounter()
        self._counter.__enter__()

    def must_ask(self, pl_module: LightningModule, batch: Any) -> bool:
        """Return whether the module itself must compute the FLOPs of a micro-batch."""
        is_asked = isinstance(pl_module, (SupportsFlops, SupportsMetaForward))
        return is_asked and self._why_not is None and (_get_key(pl_module, batch), ()) not in self._flops

    def check_loss(self, loss: Tensor) -> None:
        """Detect a compiled step, whose operators cannot be counted; call it before every backward pass."""
        self._num_backward += 1
        if self._counter is not None and is_compiled(loss):
            self._counter.error = "its step is compiled"

    def reach_optimizer(self, optimizer: Optimizer) -> None:
        """Save the count before an optimizer step, whose matmuls are not the model's; call it before each step."""
        self._stepped.append(id(optimizer))
        if self._counter is not None:
            self._at_optimizer = self._counter.flops

    def stop(self) -> FlopCounter | None:
        """Stop counting; call it after the micro-batch and after an exception."""
        counter, self._counter = self._counter, None
        if counter is not None:
            counter.__exit__(None, None, None)
        return counter

    def end_step(self) -> None:
        """Note whether this step was slowed down; call it after each optimizer step."""
        self._rests, self._is_slowed = self._is_slowed, False

    def get(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> Flops | None:
        """Return the FLOPs of the micro-batch just trained on this rank; None if unknown."""
        counter, passes = self.stop(), self._take_passes(pl_module)
        if counter is not None:
            self._name_left_out(trainer, counter)
            if counter.error is not None:
                self._give_up(trainer, pl_module, counter.error)
        if self._why_not is not None:
            return None
        key = _get_key(pl_module, batch)
        if counter is not None:
            counted = counter.flops if self._at_optimizer is None else self._at_optimizer
            return self._keep_count(trainer, pl_module, key, passes, (counted, None))
        flops = self._flops.get((key, passes)) or self._ask(trainer, pl_module, batch)
        if flops is None:
            # expected were another batch, as with a dataloader_iter, or other passes, as in a GAN
            if key != self._expected or any(key == known for known, _ in self._flops):
                self._wanted = (key, passes)
            return None
        self._keep(key, passes, flops)
        return flops

    def _take_passes(self, pl_module: LightningModule) -> tuple[Any, ...]:
        """Return what a micro-batch did beyond its shapes: its backward passes and, stepped by hand, its optimizers.

        A GAN trains its generator in every fifth batch, LBFGS evaluates a step several times.
        """
        passes: tuple[Any, ...] = (self._num_backward, *([] if pl_module.automatic_optimization else self._stepped))
        self._num_backward, self._stepped = 0, []
        return () if isinstance(pl_module, (SupportsFlops, SupportsMetaForward)) else passes

    def _keep_count(
        self, trainer: Trainer, pl_module: LightningModule, key: Any, passes: tuple[Any, ...], flops: Flops
    ) -> Flops | None:
        """Keep the FLOPs of a counted micro-batch for the next ones like it, at once if its shapes tell them."""
        self._wanted = None if self._wanted in (None, (key, passes)) else self._wanted
        if hasattr(pl_module, "recipes_flops_key") or are_telling(key):
            self._keep(key, passes, flops)
            return flops
        counts = self._counts.setdefault((key, passes), [])
        counts.append(flops[0])
        if len(set(counts)) > 1:
            self._give_up(trainer, pl_module, "batches with tensors of equal shapes differ in FLOPs")
            return None
        if len(counts) < _NUM_EQUAL:
            self._wanted = (key, passes)
        else:
            self._keep(key, passes, flops)
        return flops

    def _keep(self, key: Any, passes: tuple[Any, ...], flops: Flops) -> None:
        if len(self._flops) >= _MAX_SHAPES:
            self._flops.clear()
        self._flops[key, passes] = flops

    def _name_left_out(self, trainer: Trainer, counter: FlopCounter) -> None:
        """Name operators that count nothing, once each."""
        new = counter.left_out - self._left_out
        self._left_out |= new
        if new and trainer.is_global_zero:
            names = ", ".join(sorted(new))
            log.warning(
                f"throughput/tflops leaves out {names}: no formula is known; if they multiply matrices, register one"
                " with torch.utils.flop_counter.register_flop_formula"
            )

    def _ask(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> Flops | None:
        """Return the FLOPs of a batch as computed by the module; None if the module cannot compute them."""
        if isinstance(pl_module, SupportsFlops) and (figures := pl_module.recipes_flops(batch)) is not None:
            return float(figures.palm), float(figures.causal)
        if isinstance(pl_module, SupportsMetaForward):
            try:
                return count_flops_on_meta(pl_module, batch), None
            except Exception as error:  # the module may try to read values from meta tensors
                reason = str(error).partition("\n")[0]
                self._give_up(trainer, pl_module, f"on the meta device: {type(error).__name__}: {reason}")
        elif isinstance(pl_module, SupportsFlops):
            self._give_up(trainer, pl_module, "its recipes_flops returns None")
        elif self._num_watched == _MAX_WATCHED:
            self._num_watched += 1  # log this only once
            if trainer.is_global_zero:
                known = f"FLOP/s only in rows whose batches have the {_MAX_WATCHED} shapes that were counted"
                log.info(f"{known}: to count each takes as long as a step; {_HOW}")
        return None

    def _give_up(self, trainer: Trainer, pl_module: LightningModule, why: str) -> None:
        self._why_not = why
        if trainer.is_global_zero:
            log.warning(f"no MFU: the FLOPs of {type(pl_module).__name__} cannot be counted ({why}); {_HOW}")

    def row(self, window: Snapshot) -> dict[str, float]:
        """Return the metrics of a window over all ranks; empty if it has a micro-batch of unknown FLOPs.

        The window's seconds must be above 0.
        """
        if window.flops <= 0 or window.uncounted:
            return {}
        row = {
            "throughput/tflops": window.flops / window.device_seconds / 1e12,
            "throughput/total_tflops": window.flops / window.seconds / 1e12,
        }
        if self._measured is not None:
            row["throughput/matmul_fraction"] = row["throughput/tflops"] / self._measured
        if self._peak is not None:
            row["throughput/mfu"] = row["throughput/tflops"] / self._peak
            if window.causal_flops > 0:
                causal = window.causal_flops / window.device_seconds / 1e12
                row["throughput/mfu_causal"] = causal / self._peak
        return row


def _get_key(pl_module: LightningModule, batch: Any) -> Any:
    """Return what the FLOPs of a micro-batch depend on: its shapes, unless the module knows better."""
    get: Any = getattr(pl_module, "recipes_flops_key", get_shapes)
    return get(batch)


def get_kind(trainer: Trainer, pl_module: LightningModule) -> Kind | None:
    """Return the number format of a run's matmuls; None if no peak is known for it.

    It is the precision plugin's `compute_dtype` if it has one, else derived from Lightning's precision name.
    """
    if any(_is_fp8(module) for module in pl_module.modules()):
        return "fp8"
    dtype = getattr(trainer.precision_plugin, "compute_dtype", None)
    if isinstance(dtype, torch.dtype):
        kind = _KINDS.get(dtype)
    else:
        kind = _KINDS_BY_PRECISION.get(str(trainer.precision).partition("-")[0])
    return "tf32" if kind == "fp32" and _uses_tf32() else kind


def _uses_tf32() -> bool:
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # torch 2.9, where the other setting cannot be read once this one is set
        return str(matmul.fp32_precision) == "tf32"
    return bool(matmul.allow_tf32)


def _is_fp8(module: torch.nn.Module) -> bool:
    """Return whether a module is an FP8 layer of torchao or TransformerEngine."""
    kind = type(module)
    return kind.__name__.startswith("Float8") or kind.__module__.startswith("transformer_engine")


_SIZES = {"cuda": (4096, 8192), "cpu": (1024, 2048)}
_REPEATS = 8


def measure_peak_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the best TFLOP/s of a matmul over a few square sizes.

    The operands are random because zeros draw less power and run faster.
    """
    sizes = _SIZES["cuda" if device.type == "cuda" else "cpu"]
    best = max(_measure_tflops(size, device, dtype) for size in sizes)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return best


def _measure_tflops(size: int, device: torch.device, dtype: torch.dtype) -> float:
    generator = torch.Generator(device).manual_seed(0)  # leaves the run's own generator untouched
    # [size, size] each
    a, b = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in "ab")
    c = torch.empty_like(a)  # [size, size]
    torch.mm(a, b, out=c)
    seconds = min(_time_product(a, b, c) for _ in range(_REPEATS))
    return 2.0 * size**3 / seconds / 1e12


def _time_product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> float:
    if a.is_cuda:
        torch.cuda.synchronize(a.device)
    began = time.perf_counter()
    torch.mm(a, b, out=c)
    if a.is_cuda:
        torch.cuda.synchronize(a.device)
    return time.perf_counter() - began
