"""What a device reaches in a large matrix product: the fastest of several, under a second once at start."""

import time

import torch

_SIZES = {"cuda": (4096, 8192), "cpu": (1024, 2048)}
_REPEATS = 8


def measure_peak_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """The best rate over a few square sizes, with random operands: zeros draw less power and run faster."""
    sizes = _SIZES["cuda" if device.type == "cuda" else "cpu"]
    best = max(_tflops(size, device, dtype) for size in sizes)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return best


def _tflops(size: int, device: torch.device, dtype: torch.dtype) -> float:
    generator = torch.Generator(device).manual_seed(0)  # of its own: the run's stays where it is
    a, b = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in "ab")
    c = torch.empty_like(a)  # [size, size]
    torch.mm(a, b, out=c)
    seconds = min(_seconds(a, b, c) for _ in range(_REPEATS))
    return 2.0 * size**3 / seconds / 1e12


def _seconds(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> float:
    if a.is_cuda:
        torch.cuda.synchronize(a.device)
    began = time.perf_counter()
    torch.mm(a, b, out=c)
    if a.is_cuda:
        torch.cuda.synchronize(a.device)
    return time.perf_counter() - began
