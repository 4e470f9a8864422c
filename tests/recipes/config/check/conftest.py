"""Pretend in all tests of the checks that everything DeepSpeed compiles with is installed."""

from pathlib import Path

import pytest

from recipes.config.check import strategy as toolchain


@pytest.fixture
def deepspeed_folder(tmp_path: Path) -> Path:
    """Folder of a DeepSpeed installation without precompiled operators."""
    return tmp_path / "site-packages" / "deepspeed"


@pytest.fixture(autouse=True)
def _complete_toolchain(monkeypatch: pytest.MonkeyPatch, deepspeed_folder: Path) -> None:
    monkeypatch.setattr(toolchain, "_deepspeed_folder", lambda: deepspeed_folder)
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(toolchain, "has_libaio", lambda: True)
    monkeypatch.delenv("CXX", raising=False)
