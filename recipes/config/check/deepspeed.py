"""Offload words where the strategy cannot follow them: what exists instead."""

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

_FSDP = "strategy=fsdp strategy.cpu_offload=true"
_NVME = "strategy=deepspeed_stage_3_nvme strategy.nvme_path="
# what keeps on no device what the word names
_INSTEAD = {
    "cpu_offload": f"{_FSDP}, or strategy=deepspeed_stage_2_offload",
    "offload_optimizer": f"strategy=deepspeed_stage_2_offload, or {_FSDP}",
    "offload_parameters": f"strategy=deepspeed_stage_3_offload, or {_FSDP}",
    "nvme_path": f"{_NVME}<folder>",
}


def misplaced_offload(
    strategy: Mapping[str, Any], word: str, value: object, typed: str
) -> ConfigError | None:
    """The mistake in an offload word that a strategy does not take.

    Args:
        strategy: Its node.
        word: What comes after `strategy.`.
        value: What it was set to.
        typed: How the message names it.

    Returns:
        None where it is no offload word, or asks for no offload: there is nothing to offer instead.
    """
    if word not in _INSTEAD or value in (None, False, ""):
        return None
    option = get_traits(strategy).typed
    if word == "nvme_path":
        why, instead = f"{option} writes nothing to a disk", f"{_NVME}{value}"
    elif value == "nvme":
        why, instead = f"{option} writes nothing to a disk", _INSTEAD["nvme_path"]
    elif "cpu_offload" in read_signature(strategy["_target_"]).parameters:
        why = f"{option} offloads weights, gradients and optimizer state together"
        instead = "strategy.cpu_offload=true"
    elif "stage" not in strategy:
        why, instead = f"{option} keeps everything on its devices", _INSTEAD[word]
    elif "offload_optimizer" in strategy and strategy["offload_optimizer"] is not None:
        why, instead = f"{option} offloads already", f"nothing for strategy.{word}"
    else:
        why = f"{option} has words of its own for it"
        one = option.endswith("_1")  # of which there is no option
        instead = "strategy.offload_optimizer=cpu" if one else f"{option}_offload"
    return ConfigError(typed, why, instead)


def check_offload(strategy: Mapping[str, Any]) -> Iterator[ConfigError]:
    """What ZeRO is told to offload: whether the stage can, and whether the disk's folder is there."""
    if "stage" not in strategy:
        return
    optimizer, parameters = strategy["offload_optimizer"], strategy["offload_parameters"]
    whole = strategy["stage"] < 3
    if whole and parameters is not None:
        yield ConfigError(
            f"strategy.offload_parameters={parameters}",
            f"{get_traits(strategy).typed} keeps the parameters whole on every rank",
            _INSTEAD["nvme_path"] if parameters == "nvme" else "strategy=deepspeed_stage_3_offload",
        )
    if whole and optimizer == "nvme":  # DeepSpeed 0.19.8 would take host memory without a word
        yield ConfigError(
            "strategy.offload_optimizer=nvme",
            f"{get_traits(strategy).typed} offloads to host memory alone",
            f"strategy.offload_optimizer=cpu, or {_INSTEAD['nvme_path']}",
        )
    if not whole or "nvme" not in (optimizer, parameters):
        yield from _disk(strategy["nvme_path"], on_disk(strategy))


def on_disk(strategy: Mapping[str, Any]) -> str:
    """The settings that make ZeRO-3 use a disk, as they are typed; empty where none does."""
    words = ("offload_optimizer", "offload_parameters") if strategy["stage"] == 3 else ()
    return " ".join(f"strategy.{word}=nvme" for word in words if strategy[word] == "nvme")


def _disk(path: str | None, asked: str) -> Iterator[ConfigError]:
    typed, another = f"strategy.nvme_path={to_setting(path)}", "strategy.nvme_path=<folder>"
    if path is None and asked:
        yield ConfigError(asked, "no folder on an NVMe disk is named", another)
    elif path is not None and not asked:
        yield ConfigError(typed, "nothing is offloaded to it", f"{_NVME}{path}")
    elif path is not None and not Path(path).is_dir():
        yield ConfigError(typed, "there is no such folder", another)
    elif path is not None and not os.access(path, os.W_OK | os.X_OK):
        yield ConfigError(typed, "the folder cannot be written to", another)


# deepspeed/ops/op_builder/async_io.py links io_submit; its sources include the header
_LIBAIO_PROGRAM = "#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"


def check_toolchain(
    strategy: Mapping[str, Any], optimizer: Mapping[str, Any]
) -> Iterator[ConfigError]:
    """DeepSpeed, and a compiler where an operator of it is compiled on first use."""
    if "stage" not in strategy:
        return
    home = _deepspeed_folder()
    if home is None:
        yield ConfigError(
            get_traits(strategy).typed,
            "DeepSpeed is not installed",
            "pip install -e '.[deepspeed]'",
        )
        return
    disk, device = on_disk(strategy), strategy["offload_optimizer"]
    is_adam = str(optimizer["_target_"]).lower().endswith(("adam", "adamw"))
    compiles_adam = is_adam and device and not any(home.glob("ops/adam/cpu_adam_op*.so"))
    compiles_disk = disk and not any(home.glob("ops/aio/async_io_op*.so"))
    missing = list(_missing_tools()) if compiles_adam or compiles_disk else []
    if missing:
        typed = f"strategy.offload_optimizer={device}" if compiles_adam else disk
        what = "DeepSpeedCPUAdam" if compiles_adam else "DeepSpeed's disk access"
        yield ConfigError(
            typed,
            f"{what} is compiled on first use, and {' and '.join(why for why, _ in missing)}",
            ", and ".join(fix for _, fix in missing),
        )
    elif compiles_disk and not has_libaio():
        yield ConfigError(
            disk,
            "DeepSpeed uses the disk through libaio, and no program with libaio.h compiles here",
            "apt install libaio-dev (or yum install libaio-devel)",
        )


def _missing_tools() -> Iterator[tuple[str, str]]:
    """What torch's builder of C++ extensions needs, and how to have it.

    It calls `ninja`, and `c++` or whatever CXX names (torch/utils/cpp_extension.py, 2.13).
    """
    if shutil.which(_compiler()[0]) is None:
        others = [name for name in ("c++", "g++", "clang++") if shutil.which(name)]
        fix = f"export CXX={others[0]}" if others else "apt install g++ (or yum install gcc-c++)"
        yield f"there is no C++ compiler {_compiler()[0]}", fix
    beside = (
        Path(sys.executable).parent / "ninja"
    )  # found there by the strategy, on the PATH or not
    if shutil.which("ninja") is None and not beside.is_file():
        yield "there is no ninja", "pip install ninja"


def has_libaio() -> bool:
    """Whether a program that uses libaio compiles and links, as async_io.py finds out; about 0.1 s."""
    flags = [shlex.split(os.environ.get(name, "")) for name in ("CFLAGS", "LDFLAGS")]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "uses_libaio.cpp"
        source.write_text(_LIBAIO_PROGRAM)
        command = [*_compiler(), *flags[0], str(source), "-o", f"{folder}/out", *flags[1], "-laio"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def _deepspeed_folder() -> Path | None:
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))
