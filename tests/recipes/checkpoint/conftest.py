"""Small real checkpoints, written by the writer itself or by a run of a third of a second in this process."""

import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support import TINY, composed_config, resolved, write_texts
from torch import Tensor

from recipes.build import build
from recipes.checkpoint.manifest import Manifest
from recipes.checkpoint.retention import checkpoint_name
from recipes.checkpoint.shards import unsharded_part
from recipes.checkpoint.writer import CheckpointWriter, Outcome
from recipes.mode.fit import fit
from recipes.runtime.console import open_console
from recipes.runtime.signals import SIGNALS


class RunResult(NamedTuple):
    """How a run ended.

    Attributes:
        exit_code: Of the run.
        lines: Lines of its console.
    """

    exit_code: int
    lines: list[str]


Train = Callable[..., RunResult]
Save = Callable[..., Outcome]


@pytest.fixture(scope="session")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the overrides of a run of 20 steps with checkpoints of 489 kB at steps 10 and 20."""
    settings = [*TINY, f"data.path={write_texts(tmp_path_factory.mktemp('texts'))}", "seq_len=16"]
    settings += ["trainer.accelerator=cpu", "trainer.max_steps=20", "warmup_steps=1", "log_every=1"]
    return [*settings, "save_every=10", "eval_every=10"]


@pytest.fixture(scope="session")
def train(overrides: list[str]) -> Train:
    """Return a function that runs in this process, with callbacks in addition to those of the config."""

    def run(folder: Path, *more: str, callbacks: Iterable[Callback] = ()) -> RunResult:
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "train.log"
        before = log.read_text() if log.exists() else ""
        config = composed_config(*overrides, *more, f"hydra.run.dir={folder}")
        open_console(log)
        built = build(resolved(config, folder))
        built.trainer.callbacks[:0] = callbacks  # type: ignore[attr-defined]
        exit_code = fit(built)
        return RunResult(exit_code, log.read_text()[len(before) :].splitlines())

    return run


@pytest.fixture(scope="session")
def save() -> Save:
    """Return a function that saves a few tensors of a step through a writer and waits for the end."""

    def run(
        writer: CheckpointWriter,
        folder: Path,
        step: int,
        tensors: Mapping[str, Tensor],
        *,
        metrics: Mapping[str, float] | None = None,
    ) -> Outcome:
        manifest = Manifest(
            step=step,
            world_size=1,
            strategy="SingleDevice",
            versions={"torch": torch.__version__},
            metrics=metrics or {},
            files={},
            ended=None,
        )
        parts = {name: unsharded_part(tensor) for name, tensor in tensors.items()}
        writer.begin(folder / checkpoint_name(step), {"global_step": step}, parts, manifest)
        outcome = writer.poll(wait=True)
        assert outcome is not None, "the save has ended"
        return outcome

    return run


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """Restore the signal handlers that a run in this process replaces."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def make_undeletable(tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    """Return a function that puts an undeletable folder into a checkpoint: a mount, which not even root may remove."""
    name = "undeletable"

    def make(checkpoint: Path) -> None:
        stuck = checkpoint / name
        stuck.mkdir()
        (stuck / "file").touch()
        if subprocess.run(["mount", "-t", "tmpfs", "none", str(stuck)], capture_output=True, check=False).returncode:
            stuck.chmod(0o500)

    yield make
    for stuck in tmp_path.rglob(name):
        subprocess.run(["umount", str(stuck)], capture_output=True, check=False)
        stuck.chmod(0o700)
