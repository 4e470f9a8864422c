"""What DeepSpeed needs on this machine: itself, and the tools that compile its operators. No import, no torch."""

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

from recipes.check.offload import engine_of, on_disk, option_of
from recipes.mistake import Mistake

# deepspeed/ops/op_builder/async_io.py links io_submit; its sources include the header
_LIBAIO_PROGRAM = "#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"


def check_toolchain(strategy: Mapping[str, Any], optimizer: Mapping[str, Any]) -> Iterator[Mistake]:
    """DeepSpeed, and a compiler where an operator of it is compiled on first use."""
    if engine_of(strategy) != "Zero":
        return
    home = _deepspeed_folder()
    if home is None:
        yield Mistake(
            option_of(strategy), "DeepSpeed is not installed", "pip install -e '.[deepspeed]'"
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
        yield Mistake(
            typed,
            f"{what} is compiled on first use, and {' and '.join(why for why, _ in missing)}",
            ", and ".join(remedy for _, remedy in missing),
        )
    elif compiles_disk and not has_libaio():
        yield Mistake(
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
        remedy = f"export CXX={others[0]}" if others else "apt install g++ (or yum install gcc-c++)"
        yield f"there is no C++ compiler {_compiler()[0]}", remedy
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
