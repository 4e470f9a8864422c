"""Check the offload settings of a strategy, and the tools that DeepSpeed compiles with."""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recipes.config.check.types import to_setting
from recipes.config.signature import read_signature
from recipes.config.traits import get_traits
from recipes.errors import ConfigError
from recipes.runtime.world import num_gpus

_FSDP = "strategy=fsdp strategy.cpu_offload=true"
_NVME = "strategy=deepspeed_stage_3_nvme strategy.nvme_path="
# offload setting -> what to type for the same effect
_ALTERNATIVES = {
    "cpu_offload": f"{_FSDP}, or strategy=deepspeed_stage_2_offload",
    "offload_optimizer": f"strategy=deepspeed_stage_2_offload, or {_FSDP}",
    "offload_parameters": f"strategy=deepspeed_stage_3_offload, or {_FSDP}",
    "nvme_path": f"{_NVME}<folder>",
}


def misplaced_offload(strategy: Mapping[str, Any], setting: str, value: object, typed: str) -> ConfigError | None:
    """Return the error in an offload setting that the strategy does not support.

    Args:
        strategy: Config node of the strategy.
        setting: Name after `strategy.`.
        value: Its value.
        typed: Override, to name it in the message.

    Returns:
        None if it is not an offload setting or disables offload: there is no alternative to offer.
    """
    if setting not in _ALTERNATIVES or value in (None, False, ""):
        return None
    option = get_traits(strategy).typed
    if setting == "nvme_path":
        reason, fix = f"{option} does not use a disk", f"{_NVME}{value}"
    elif value == "nvme":
        reason, fix = f"{option} does not use a disk", _ALTERNATIVES["nvme_path"]
    elif "cpu_offload" in read_signature(strategy["_target_"]).parameters:
        reason = f"{option} offloads weights, gradients and optimizer state together"
        fix = "strategy.cpu_offload=true"
    elif "stage" not in strategy:
        reason, fix = f"{option} keeps everything on its devices", _ALTERNATIVES[setting]
    elif "offload_optimizer" in strategy and strategy["offload_optimizer"] is not None:
        reason, fix = f"{option} offloads already", f"the same command without strategy.{setting}"
    else:
        reason = f"{option} has settings of its own for it"
        is_stage_1 = option.endswith("_1")  # which has no offload option
        fix = "strategy.offload_optimizer=cpu" if is_stage_1 else f"{option}_offload"
    return ConfigError(typed, reason, fix)


def check_offload(strategy: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Check that the ZeRO stage supports the requested offload, and that the folder on disk exists."""
    if "stage" not in strategy:
        return
    optimizer, parameters = strategy["offload_optimizer"], strategy["offload_parameters"]
    keeps_parameters = strategy["stage"] < 3
    if keeps_parameters and parameters is not None:
        yield ConfigError(
            f"strategy.offload_parameters={parameters}",
            f"{get_traits(strategy).typed} keeps all parameters on every rank",
            _ALTERNATIVES["nvme_path"] if parameters == "nvme" else "strategy=deepspeed_stage_3_offload",
        )
    if keeps_parameters and optimizer == "nvme":  # DeepSpeed 0.19.8 silently uses host memory
        yield ConfigError(
            "strategy.offload_optimizer=nvme",
            f"{get_traits(strategy).typed} offloads to host memory only",
            f"strategy.offload_optimizer=cpu, or {_ALTERNATIVES['nvme_path']}",
        )
    if not keeps_parameters or "nvme" not in (optimizer, parameters):
        yield from _check_folder(strategy["nvme_path"], get_disk_settings(strategy))


def get_disk_settings(strategy: Mapping[str, Any]) -> str:
    """Return the settings that make ZeRO-3 use a disk, as typed; empty if there are none."""
    settings = ("offload_optimizer", "offload_parameters") if strategy["stage"] == 3 else ()
    return " ".join(f"strategy.{name}=nvme" for name in settings if strategy[name] == "nvme")


def _check_folder(path: str | None, settings: str) -> Iterator[ConfigError]:
    typed, another = f"strategy.nvme_path={to_setting(path)}", "strategy.nvme_path=<folder>"
    if path is None and settings:
        yield ConfigError(settings, "no folder on an NVMe disk is set", another)
    elif path is not None and not settings:
        yield ConfigError(typed, "nothing is offloaded to it", f"{_NVME}{path}")
    elif path is not None and not Path(path).is_dir():
        yield ConfigError(typed, "there is no such folder", another)
    elif path is not None and not os.access(path, os.W_OK | os.X_OK):
        yield ConfigError(typed, "the folder cannot be written to", another)


# deepspeed/ops/op_builder/async_io.py links io_submit; its sources include the header
_LIBAIO_PROGRAM = "#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"


def check_toolchain(
    strategy: Mapping[str, Any], optimizer: Mapping[str, Any], *, accelerator: str | None
) -> Iterator[ConfigError]:
    """Check that DeepSpeed is installed, and a compiler if it will compile an operator on first use.

    Args:
        strategy: Config node.
        optimizer: Config node.
        accelerator: Of the Trainer; None is its default, a GPU if there is one.
    """
    if "stage" not in strategy:
        return
    installed = _deepspeed_folder()
    if installed is None:
        yield ConfigError(
            get_traits(strategy).typed,
            "DeepSpeed is not installed",
            "pip install -e '.[deepspeed]'",
        )
        return
    disk, device = get_disk_settings(strategy), strategy["offload_optimizer"]
    is_adam = str(optimizer["_target_"]).lower().endswith(("adam", "adamw"))
    compiles_adam = is_adam and device and not any(installed.glob("ops/adam/cpu_adam_op*.so"))
    compiles_disk = disk and not any(installed.glob("ops/aio/async_io_op*.so"))
    missing = list(_missing_tools()) if compiles_adam or compiles_disk else []
    if missing:
        typed = f"strategy.offload_optimizer={device}" if compiles_adam else disk
        what = "DeepSpeedCPUAdam" if compiles_adam else "DeepSpeed's disk access"
        yield ConfigError(
            typed,
            f"{what} is compiled on first use, but there is no {' and no '.join(tool for tool, _ in missing)}",
            ", and ".join(fix for _, fix in missing),
        )
    elif compiles_disk and not has_libaio():
        yield ConfigError(
            disk,
            "DeepSpeed uses libaio for the disk, and a test program that includes libaio.h failed to compile",
            "apt install libaio-dev (or yum install libaio-devel)",
        )
    elif compiles_disk and accelerator != "cpu" and num_gpus() and (home := _missing_cuda_home()) is not None:
        yield ConfigError(
            disk,
            f"on a GPU DeepSpeed compiles its disk access against the CUDA toolkit, and there is no {home}/bin/nvcc",
            "export CUDA_HOME=<a CUDA toolkit of torch's version>, or strategy=deepspeed_stage_3_offload",
        )


def _missing_cuda_home() -> str | None:
    """Return where torch's builder looks for the CUDA toolkit if it is missing; None if it is present.

    The places are those of `_find_cuda_home` in torch/utils/cpp_extension.py (2.13).
    """
    on_path = shutil.which("nvcc")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    home = home or (str(Path(on_path).parents[1]) if on_path else "/usr/local/cuda")
    is_amd = Path("/dev/kfd").exists()  # which has a toolkit of its own
    return None if is_amd or (Path(home) / "bin" / "nvcc").is_file() else home


def _missing_tools() -> Iterator[tuple[str, str]]:
    """Find what torch's builder of C++ extensions needs and this machine lacks, and how to install it.

    It calls `ninja`, and `c++` or whatever CXX names (torch/utils/cpp_extension.py, 2.13).
    """
    compiler = missing_compiler()
    if compiler is not None:
        yield compiler
    # the strategy adds the interpreter's folder to the PATH
    bundled = Path(sys.executable).parent / "ninja"
    if shutil.which("ninja") is None and not bundled.is_file():
        yield "ninja", "pip install ninja"


def missing_compiler() -> tuple[str, str] | None:
    """Return the C++ compiler that this machine lacks and how to install one; None if there is one."""
    if shutil.which(_compiler()[0]) is not None:
        return None
    others = [name for name in ("c++", "g++", "clang++") if shutil.which(name)]
    fix = f"export CXX={others[0]}" if others else "apt install g++ (or yum install gcc-c++)"
    return f"C++ compiler ({_compiler()[0]})", fix


def has_libaio() -> bool:
    """Return whether a program that uses libaio compiles and links, the test of async_io.py; about 0.1 s."""
    flags = [shlex.split(os.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS")]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "uses_libaio.cpp"
        source.write_text(_LIBAIO_PROGRAM, encoding="utf-8")
        command = [*_compiler(), *flags[0], str(source), "-o", f"{folder}/out", *flags[1], "-laio"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def _deepspeed_folder() -> Path | None:
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))
