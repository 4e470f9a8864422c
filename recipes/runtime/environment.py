"""Record the environment of a run: versions, devices, git state, command line. A few ms, two git calls."""

import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = (
    "torch",
    "lightning",
    "hydra-core",
    "omegaconf",
    "numpy",
    "tokenizers",
    "wandb",
    "deepspeed",
)


def describe_environment(overrides: list[str]) -> dict[str, Any]:
    """Return the information needed to trace a run's results, as plain values for JSON."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "overrides": overrides,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hostname": platform.node(),
        "packages": {name: installed for name in _PACKAGES if (installed := _version(name))},
        "cuda": torch.version.cuda,
        "devices": _device_names(),
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "git": _git_state(Path(__file__).parent),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device_names() -> list[str]:
    if torch.cuda.is_available():
        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return [_cpu_name()]


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit and whether the tree was dirty; None outside a repository or without git."""
    try:
        commit = _run(["git", "rev-parse", "HEAD"], folder)
        # without the lock of the user's index, which a run that is killed meanwhile would leave there
        status = _run(["git", "--no-optional-locks", "status", "--porcelain"], folder)
        return {"commit": commit, "dirty": bool(status)}
    except (OSError, subprocess.CalledProcessError):
        return None


def _run(command: list[str], folder: Path) -> str:
    result = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return result.stdout.strip()
