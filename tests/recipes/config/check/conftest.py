"""Every test of the checks: a machine that has what DeepSpeed compiles with, whatever this one has."""

from pathlib import Path

import pytest

from recipes.config.check import deepspeed as toolchain


@pytest.fixture
def deepspeed_folder(tmp_path: Path) -> Path:
    """Where DeepSpeed is installed, nothing compiled in advance."""
    return tmp_path / "site-packages" / "deepspeed"


@pytest.fixture(autouse=True)
def _whole_toolchain(monkeypatch: pytest.MonkeyPatch, deepspeed_folder: Path) -> None:
    monkeypatch.setattr(toolchain, "_deepspeed_folder", lambda: deepspeed_folder)
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(toolchain, "has_libaio", lambda: True)
    monkeypatch.delenv("CXX", raising=False)
