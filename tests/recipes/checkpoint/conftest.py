"""Real small checkpoints: written by the writer itself, or by a run of a third of a second in this process."""

import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support import TINY, composed_config, write_texts
from torch import Tensor

from recipes.build import build
from recipes.checkpoint.manifest import Manifest
from recipes.checkpoint.retention import checkpoint_name
from recipes.checkpoint.shards import unsharded_part
from recipes.checkpoint.writer import CheckpointWriter, Outcome
from recipes.mode.fit import fit
from recipes.runtime.console import open_console
from recipes.runtime.signals import SIGNALS


class Ended(NamedTuple):
    """How a run ended.

    Attributes:
        exit_code: Of the run.
        lines: What its console showed.
    """

    exit_code: int
    lines: list[str]


Train = Callable[..., Ended]
Save = Callable[..., Outcome]


@pytest.fixture(scope="session")
def run_words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run of 20 steps and, at its default hidden_size, checkpoints of 489 kB at steps 10 and 20."""
    words = [*TINY, f"data.path={write_texts(tmp_path_factory.mktemp('texts'))}", "seq_len=16"]
    words += ["trainer.accelerator=cpu", "trainer.max_steps=20", "warmup_steps=1", "log_every=1"]
    return [*words, "save_every=10", "eval_every=10"]


@pytest.fixture(scope="session")
def train(run_words: list[str]) -> Train:
    """Runs in this process, with callbacks beside those of the config."""

    def run(folder: Path, *words: str, callbacks: Iterable[Callback] = ()) -> Ended:
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "train.log"
        before = log.read_text() if log.exists() else ""
        config = composed_config(*run_words, *words, f"hydra.run.dir={folder}")
        open_console(log)
        built = build(config, folder, [])
        built.trainer.callbacks[:0] = callbacks  # type: ignore[attr-defined]
        exit_code = fit(built)
        return Ended(exit_code, log.read_text()[len(before) :].splitlines())

    return run


@pytest.fixture(scope="session")
def save() -> Save:
    """Saves a few tensors of a step through a writer and waits for the end."""

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
        )
        parts = {name: unsharded_part(tensor) for name, tensor in tensors.items()}
        writer.begin(folder / checkpoint_name(step), {"global_step": step}, parts, manifest)
        outcome = writer.poll(wait=True)
        assert outcome is not None, "it was waited for"
        return outcome

    return run


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """What a run in this process listens to does not outlive it."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def make_undeletable(tmp_path: Path) -> Iterator[Callable[[Path], None]]:
    """Puts a folder into a checkpoint that cannot be removed; not even root may remove what is mounted."""
    word = "undeletable"

    def make(checkpoint: Path) -> None:
        stuck = checkpoint / word
        stuck.mkdir()
        (stuck / "file").touch()
        if subprocess.run(
            ["mount", "-t", "tmpfs", "none", str(stuck)], capture_output=True, check=False
        ).returncode:
            stuck.chmod(0o500)

    yield make
    for stuck in tmp_path.rglob(word):
        subprocess.run(["umount", str(stuck)], capture_output=True, check=False)
        stuck.chmod(0o700)
