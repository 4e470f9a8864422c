"""Freed host memory is reused without page faults, unless the user has configured the allocator."""

import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, composed_config, resolved

import recipes.build

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an option of glibc")

NUM_TENSORS = 8
PAGES = 64 * 2**20 // resource.getpagesize()  # in one tensor
SCRIPT = f"""
import ctypes, resource, torch
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a fault is one page, not 2 MiB
from recipes.runtime.allocator import keep_freed_memory
print(keep_freed_memory())
for _ in range(30):  # glibc 2.36 needs up to nine: its aligned allocation asks for more than a freed tensor leaves
    torch.ones(2**24)  # 64 MiB: allocated, touched and freed
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({NUM_TENSORS}):
    torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def count_page_faults(**variables: str) -> tuple[bool, int]:
    """Return whether memory is kept, and the page faults of eight tensors of 64 MiB, allocated one after another."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    printed = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return printed[0] == "True", int(printed[1])


def test_eight_tensors_after_thirty_freed_ones_fault_less_than_a_tenth_of_a_tensors_pages() -> None:
    kept, faults = count_page_faults()
    assert kept
    assert faults < PAGES / 10


@pytest.mark.parametrize(
    "variables",
    [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}],
    ids=["variable", "tunable"],
)
def test_settings_of_the_user_are_kept_and_every_tensor_faults_in_again(variables: dict[str, str]) -> None:
    kept, faults = count_page_faults(**variables)
    assert not kept
    assert faults > NUM_TENSORS * PAGES * 0.9


def test_a_run_on_a_cpu_keeps_freed_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []
    monkeypatch.setattr(recipes.build, "keep_freed_memory", lambda: calls.append(1))
    recipes.build.build(resolved(composed_config("data=random_tokens", "trainer.accelerator=cpu"), tmp_path))
    assert len(calls) == 1
