"""Check that this machine's devices support the configured dtypes, attention kernels and compilation."""

import importlib.util
import shutil
from collections.abc import Iterator

from recipes.config.check.strategy import missing_compiler
from recipes.config.check.types import to_setting
from recipes.config.resolved import ResolvedRun
from recipes.errors import ConfigError, type_extra


def check_devices(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check precision and compilation of a run that takes its steps on this machine.

    Args:
        run: Composed run whose nodes match their signatures.
    """
    if not run.mode.takes_steps or run.runs_elsewhere:
        return
    if run.precision == "tf32" and not run.on_gpu:
        yield ConfigError("precision=tf32", "TF32 needs a GPU, and there is none", "precision=32-true")
    if run.precision == "fp8-mixed":
        yield from _check_float8(run)
    yield from _check_attention(run)
    if run.compile_mode is None:
        return
    typed = f"compile={to_setting(run.config['compile'])}"
    yield from _check_tools(typed, on_gpu=run.on_gpu)
    if run.compile_mode == "reduce-overhead":
        yield from _check_graphs(run, typed)


def _check_float8(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check for torchao, a GPU unless float8 is emulated, and a strategy that does not shard its modules."""
    if importlib.util.find_spec("torchao") is None:
        yield ConfigError("precision=fp8-mixed", "torchao is not installed", type_extra("fp8"))
    if not (run.on_gpu or run.config["precision"]["emulate"]):
        yield ConfigError(
            "precision=fp8-mixed",
            "float8 matmuls need a GPU, and there is none",
            "precision=bf16-mixed, or precision.emulate=true to try the rounding",
        )
    if run.strategy.state_layout == "zero":
        yield ConfigError(
            f"precision=fp8-mixed {run.strategy.typed}",
            "DeepSpeed computes with weights of its own, which torchao does not cast",
            "strategy=fsdp, or precision=bf16-mixed",
        )


def _check_attention(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check that the attention kernel exists on the device and supports the precision of the run."""
    name, precision, on_gpu = run.config.get("attention", "auto"), run.precision, run.on_gpu
    if name in ("cudnn", "memory_efficient") and not on_gpu:
        yield ConfigError(f"attention={name}", "it is a GPU kernel, and there is no GPU", "attention=auto")
    elif name in ("flash", "cudnn") and on_gpu and precision in ("32-true", "tf32"):
        yield ConfigError(
            f"attention={name} precision={precision}",
            "the kernel takes float16 and bfloat16 only",
            "attention=memory_efficient, or precision=bf16-mixed",
        )
    elif name in ("flash", "cudnn") and on_gpu and run.config["data"].get("packing") is True:
        yield ConfigError(
            f"attention={name} data.packing=true",
            "packed examples must not see each other, and the kernel takes no mask",
            "attention=auto, or data.packing=false",
        )


def _check_tools(typed: str, *, on_gpu: bool) -> Iterator[ConfigError]:
    """Check for the compiler that torch.compile calls: for C++ on a CPU, for C around each kernel on a GPU (Triton)."""
    if not on_gpu and (missing := missing_compiler()) is not None:
        name, fix = missing
        yield ConfigError(
            typed, f"torch.compile writes C++ for a CPU, and there is no {name}", f"{fix}, or compile=false"
        )
    elif on_gpu and not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        yield ConfigError(
            typed,
            "torch.compile calls a C compiler for each kernel, and there is none (cc, gcc, clang)",
            "apt install gcc (or yum install gcc), or compile=false",
        )


def _check_graphs(run: ResolvedRun, typed: str) -> Iterator[ConfigError]:
    """Check the requirements of CUDA graphs: a GPU, and fixed addresses of weights and gradients."""
    reason = None
    if not run.on_gpu:
        reason = "CUDA graphs need a GPU, and there is none"
    elif run.strategy.state_layout != "whole":
        reason = f"{run.strategy.typed} gathers weights to other addresses at each step"
    elif run.micro_batch_size not in (None, run.global_batch_size):
        reason = "gradients accumulated over micro-batches would be overwritten by the next replay of the graph"
    if reason is not None:
        yield ConfigError(typed, reason, "compile=default, or compile=max-autotune-no-cudagraphs")
