"""This machine's device, driver, libraries and working kernels. Each kernel is tried, none is assumed."""

import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpu_checks.check import Outcome, Settings, judge
from recipes.config.check.strategy import has_libaio
from recipes.runtime.environment import describe_environment

GIB = 2**30
_FAST_ATTENTION = ("flash attention", "efficient attention", "cudnn attention")
_TENSOR_CORES_WITH_BF16 = (8, 0)  # compute capability of Ampere


def machine(settings: Settings) -> Outcome:
    """Report versions and devices, which are recorded with every result."""
    return judge([], headline="", figures=describe_machine() | {"gpus": describe_gpus()})


def environment(settings: Settings) -> Outcome:
    """Try every kernel and tool; fail if a recipe would be slow on this GPU."""
    device = torch.device("cuda" if settings.accelerator == "gpu" else "cpu")
    kernels = {name: _try(partial(kernel, device)) for name, kernel in KERNELS.items()}
    figures = {"kernels": kernels, "tools": describe_tools()}
    works = [name for name, result in kernels.items() if result == "works"]
    failures = find_failures(kernels, describe_gpus()) if device.type == "cuda" else []
    missing = [f"{name}: {result}" for name, result in kernels.items() if result != "works"]
    headline = f"torch {torch.__version__}, CUDA {torch.version.cuda}, {len(works)} of {len(kernels)} kernels"
    return judge(failures, headline=headline, figures=figures, note="; ".join(missing))


def describe_machine() -> dict[str, Any]:
    """Return versions of Python, torch, its libraries and the driver; None for missing ones."""
    found = describe_environment([])
    has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    return {
        "torch": torch.__version__,
        "python": found["python"],
        "packages": found["packages"],
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        "driver": _read_driver(),
        "num_cpus": found["num_cpus"],
        "cpu": None if found["devices"] and torch.cuda.is_available() else found["devices"][0],
        "commit": found["git"],
    }


def describe_gpus() -> list[dict[str, Any]]:
    """Return name, memory, capability and peer access from the first GPU for every GPU; empty if there is none."""
    if not torch.cuda.is_available():
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": torch.cuda.get_device_name(index),
                "memory_gib": round(properties.total_memory / GIB, 1),
                "capability": list(torch.cuda.get_device_capability(index)),
                "has_bfloat16": torch.cuda.is_bf16_supported(including_emulation=False),
                "peer_of_the_first": index == 0 or torch.cuda.can_device_access_peer(0, index),
            }
        )
    return gpus


def describe_tools() -> dict[str, bool]:
    """Return whether each tool that DeepSpeed's operators and torch.compile need is installed."""
    from torch.utils.cpp_extension import CUDA_HOME

    return {
        "nvcc": shutil.which("nvcc") is not None,
        "CUDA_HOME": CUDA_HOME is not None,
        "C++ compiler": shutil.which(os.environ.get("CXX", "c++")) is not None,
        "libaio": shutil.which("c++") is not None and has_libaio(),
        "deepspeed": importlib.util.find_spec("deepspeed") is not None,
        "triton": importlib.util.find_spec("triton") is not None,
    }


def find_failures(kernels: dict[str, str], gpus: list[dict[str, Any]]) -> list[str]:
    """Return the kernels that every recipe needs on a GPU but that do not work on this one.

    Args:
        kernels: For each kernel, `works` or the reason why not.
        gpus: Result of `describe_gpus`.
    """
    needed = ["fused AdamW", "torch.compile"]
    is_modern = bool(gpus) and tuple(gpus[0]["capability"]) >= _TENSOR_CORES_WITH_BF16
    needed += ["bfloat16 matmul", "TF32 matmul"] if is_modern else []
    failures = [f"{name}: {kernels[name]}" for name in needed if kernels[name] != "works"]
    if is_modern and not any(kernels[name] == "works" for name in _FAST_ATTENTION):
        failures.append(f"none of {', '.join(_FAST_ATTENTION)} works: attention is computed in full")
    return failures


def _try(kernel: Callable[[], None]) -> str:
    """Return `works`, or the first line of the error."""
    try:
        kernel()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:160]}"
    return "works"


def _attend(backend: SDPBackend, device: torch.device) -> None:
    """Run attention forward and backward with one backend, in the shape of a GPT-2 block."""
    shape = (2, 12, 128, 64)  # [B, H, T, C / H]
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    with sdpa_kernel(backend):
        scaled_dot_product_attention(q, k, v, is_causal=True).float().sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()


def _step_fused(device: torch.device) -> None:
    """Take one step of fused AdamW, and one that `found_inf` skips on the device."""
    weight = torch.nn.Parameter(torch.ones(64, device=device))
    optimizer: Any = torch.optim.AdamW([weight], lr=0.1, fused=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    after_one = weight.detach().clone()  # [64]
    optimizer.found_inf = torch.ones((), device=device)
    optimizer.step()
    assert (after_one != 1).all(), "the step changed nothing"
    assert torch.equal(weight.detach(), after_one), "found_inf did not skip the step"


def _error_of_product(a: Tensor, b: Tensor) -> float:
    exact = a.double() @ b.double()  # [256, 256]
    return float(((a @ b).double() - exact).norm() / exact.norm())


def _multiply_bf16(device: torch.device) -> None:
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise RuntimeError("this GPU only emulates bfloat16: use precision=16-mixed")
    a, b = (torch.randn(256, 256, device=device, dtype=torch.bfloat16) for _ in "ab")
    assert _error_of_product(a, b) < 1e-2


def _multiply_tf32(device: torch.device) -> None:
    """Multiply with TF32 allowed; its ten mantissa bits show in the error."""
    a, b = (torch.randn(256, 256, device=device) for _ in "ab")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        error = _error_of_product(a, b)
    finally:
        torch.set_float32_matmul_precision(before)
    if error < 1e-5:
        raise RuntimeError(f"the product is in full float32, with an error of {error:.0e}")


def _compile(device: torch.device) -> None:
    """Compile and run a small function: Triton on a GPU, the C++ compiler on a CPU."""

    def small(x: Tensor) -> Tensor:
        return (2 * x + 1).relu().sum()

    x = torch.randn(256, 256, device=device)
    began = time.perf_counter()
    compiled: Tensor = torch.compile(small)(x)
    assert torch.isclose(compiled, small(x), rtol=1e-4)
    print(f"torch.compile took {time.perf_counter() - began:.1f} s")


KERNELS: dict[str, Callable[[torch.device], None]] = {
    "flash attention": partial(_attend, SDPBackend.FLASH_ATTENTION),
    "efficient attention": partial(_attend, SDPBackend.EFFICIENT_ATTENTION),
    "cudnn attention": partial(_attend, SDPBackend.CUDNN_ATTENTION),
    "fused AdamW": _step_fused,
    "bfloat16 matmul": _multiply_bf16,
    "TF32 matmul": _multiply_tf32,
    "torch.compile": _compile,
}


def _read_driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.split()
    return lines[0] if lines else None
