"""torchvision beside a torch that its compiled part does not fit, imported in a process of its own."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed")

_AFTER = """
import recipes
import lightning.pytorch  # imports torchmetrics, which imports torchvision
import torch
from torchvision.transforms import v2
assert v2.RandomResizedCrop(8, antialias=True)(torch.zeros(3, 16, 16)).shape == (3, 8, 8)
try:
    torch.ops.torchvision.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
except (NotImplementedError, RuntimeError) as error:
    print("operator:", type(error).__name__)
else:
    print("operator: works")
"""


def _run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


def test_lightning_and_transforms_work_after_recipes_is_imported() -> None:
    done = _run(_AFTER)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("operator: ")


@pytest.mark.skipif(torch.version.cuda is not None, reason="the torchvision of PyPI fits a torch with CUDA")
def test_recipes_torchvision_import_is_needed_still() -> None:
    """If this fails, pytorch/vision#9085 is mended in the oldest torchvision here: delete that module and this test."""
    done = _run("import torchvision")
    assert done.returncode != 0
    assert "operator torchvision::nms does not exist" in done.stderr
