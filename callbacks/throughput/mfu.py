"""Model FLOPs utilization (MFU): the fraction of a device's peak that the model's own arithmetic uses.

The FLOPs are computed once per shape of a micro-batch.
"""

import logging
import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from .flop_counter import count_flops, get_shapes
from .peak_flops import Kind, Peak, get_peak
from .stopwatch import Snapshot

log = logging.getLogger("lightning_recipes")
_KINDS: dict[torch.dtype, Kind] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}
_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": torch.float32,
    "fp32": torch.float32,
}
_MAX_SHAPES = 256  # whose FLOPs are remembered
_MAX_COUNTED = 32  # shapes to count on the meta device: each takes as long as a step


class FlopMeter:
    """Knows the FLOPs of a micro-batch and the peak of the device.

    Args:
        peak_tflops: The device's dense peak in TFLOP/s; None takes it from the table of published peaks.
        measure_peak: Time a matmul and log the fraction of its rate instead.
    """

    def __init__(self, *, peak_tflops: float | None, measure_peak: bool) -> None:
        self._peak_tflops = peak_tflops
        self._measure_peak = measure_peak
        self._flops: dict[Any, tuple[float, float | None]] = {}  # by shapes of a micro-batch
        self._num_counted = 0  # on the meta device
        self._cannot_count = False
        self._peak: Peak | None = None
        self._measured: float | None = None  # TFLOP/s

    def start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the peak, and log which it is or why there is none."""
        device, kind = trainer.strategy.root_device, get_kind(trainer, pl_module)
        if self._measure_peak:
            if kind is None or kind == "fp8" or (kind == "fp16" and device.type == "cpu"):
                message = f"no MFU: products of {kind or 'this precision'} are not measured"
            else:
                self._measured = measure_peak_tflops(device, _DTYPES[kind])
                message = f"a matmul in {kind} reaches {self._measured:.4g} TFLOP/s here"
        elif self._peak_tflops is not None:
            self._peak = Peak(self._peak_tflops, "peak_tflops, as set")
            message = f"MFU is relative to {self._peak_tflops:g} TFLOP/s, as set by peak_tflops"
        elif kind is None:
            message = "no MFU: the precision of this run has no published peak"
        elif device.type != "cuda":
            message = (
                f"no MFU: a {device.type} has no published peak;"
                " callbacks.throughput.measure_peak=true logs the fraction of a measured matmul"
            )
        else:
            self._peak = get_peak(torch.cuda.get_device_name(device), kind)
            message = self._peak.description
        if trainer.is_global_zero:
            log.info(message)

    def known(self, batch: Any) -> tuple[float, float | None] | None:
        """Return the remembered FLOPs of a micro-batch of these shapes; None if they are new."""
        if self._cannot_count:
            return 0.0, None
        return self._flops.get(get_shapes(batch))

    def compute(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> tuple[float, float | None]:
        """Return the FLOPs of a micro-batch on this rank: with attention in full, and with causal attention at half.

        They come from the module's `flops_of(batch)`, whose result has `palm` and `causal`. Otherwise they are
        counted, in full only (None for the second); 0 where they cannot be.
        """
        own = getattr(pl_module, "flops_of", None)
        if callable(own) and (figures := own(batch)) is not None:
            flops: tuple[float, float | None] = (float(figures.palm), float(figures.causal))
        else:
            flops = (self._count(trainer, pl_module, batch), None)
        if self._cannot_count:
            return 0.0, None
        if len(self._flops) >= _MAX_SHAPES:
            self._flops.clear()
        if shapes := get_shapes(batch):
            self._flops[shapes] = flops
        return flops

    def _count(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> float:
        self._num_counted += 1
        why = ""
        if not hasattr(pl_module, "forward_on_meta"):
            if trainer.world_size > 1:
                why = "its training_step may wait for other ranks"
            if not pl_module.automatic_optimization:
                why = "its training_step steps its optimizers"
        if self._num_counted > _MAX_COUNTED:
            why = f"its batches have more than {_MAX_COUNTED} shapes"
        if not why:
            try:
                return count_flops(pl_module, batch)
            except Exception as error:
                # a module may do anything with a tensor that has no values
                why = f"{type(error).__name__} on the meta device"
        self._cannot_count = True
        if trainer.is_global_zero:
            log.info(
                f"no MFU: the FLOPs of {type(pl_module).__name__} cannot be counted ({why});"
                " give it flops_of(batch) with .palm and .causal"
            )
        return 0.0

    def row(self, window: Snapshot) -> dict[str, float]:
        """Return the metrics of a window over all ranks; its seconds must be above 0."""
        if window.flops <= 0 or self._cannot_count:
            return {}
        row = {
            "throughput/tflops": window.flops / window.device_seconds / 1e12,
            "throughput/total_tflops": window.flops / window.seconds / 1e12,
        }
        if self._measured is not None:
            row["throughput/matmul_fraction"] = row["throughput/tflops"] / self._measured
        peak = None if self._peak is None else self._peak.tflops
        if peak is not None:
            row["throughput/mfu"] = row["throughput/tflops"] / peak
            if window.causal_flops > 0:
                causal = window.causal_flops / window.device_seconds / 1e12
                row["throughput/mfu_causal"] = causal / peak
        return row


def get_kind(trainer: Trainer, pl_module: LightningModule) -> Kind | None:
    """Return the arithmetic of a run's matmuls; None if no peak is known for it.

    A precision plugin may give it as `compute_dtype`; Lightning's plugins give it in their name.
    """
    if any(_is_fp8(module) for module in pl_module.modules()):
        return "fp8"
    dtype = getattr(trainer.precision_plugin, "compute_dtype", None)
    if not isinstance(dtype, torch.dtype):
        dtypes = {"bf16": torch.bfloat16, "16": torch.float16, "32": torch.float32}
        precision = str(trainer.precision).partition("-")[0]
        if precision == "transformer":  # transformer-engine
            return "fp8"
        if precision not in dtypes:
            return None
        dtype = dtypes[precision]
    if dtype not in _KINDS:
        return None
    kind = _KINDS[dtype]
    if kind == "fp32" and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return kind


def _is_fp8(module: torch.nn.Module) -> bool:
    """Return whether this is a layer of torchao or TransformerEngine that multiplies in eight bits."""
    kind = type(module)
    return kind.__name__.startswith("Float8") or kind.__module__.startswith("transformer_engine")


_SIZES = {"cuda": (4096, 8192), "cpu": (1024, 2048)}
_REPEATS = 8


def measure_peak_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the best TFLOP/s of a matmul over a few square sizes.

    The operands are random: zeros draw less power and run faster.
    """
    sizes = _SIZES["cuda" if device.type == "cuda" else "cpu"]
    best = max(_measure_tflops(size, device, dtype) for size in sizes)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return best


def _measure_tflops(size: int, device: torch.device, dtype: torch.dtype) -> float:
    generator = torch.Generator(device).manual_seed(0)  # the run's own generator is not advanced
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
