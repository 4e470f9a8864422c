"""Start runs as a user would: `train.py` in a separate process, or the same config built and trained in this one."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning.pytorch.callbacks import Callback

from gpu_checks.check import Settings
from recipes.build import Run, build
from recipes.config import compose_and_check
from recipes.run_folder import CHECKPOINTS
from recipes.runtime.console import open_console

ROOT = Path(__file__).parents[2]
# two layers of 32 channels: fast on a CPU, and they use every kernel that a large model uses
TINY_GPT2 = [
    "model=gpt2_nano",
    "model.vocab_size=64",
    "model.max_seq_len=16",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.hidden_size=32",
]
# images of 32 x 32 pixels: the same layers, on a CPU a second a step
TINY_IMAGES = ["data.image_size=32", "model.num_classes=10"]
# only trains, with the monitoring callbacks
BARE = [
    "eval_samples=1",
    "eval_every=1000000",
    "save_every=null",
    "callbacks.sample_text=null",
    "callbacks.report=null",
]
QUIET = ["data=random_tokens", *BARE]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A finished command: exit code, output, run folder and duration in seconds."""

    code: int
    output: str
    folder: Path
    seconds: float


def run_train(
    settings: Settings,
    name: str,
    overrides: Sequence[str],
    *,
    launcher: Sequence[str] = (),
    limit_seconds: float,
    limit_bytes: int | None = None,
) -> Finished:
    """Run `python train.py …` and wait for it.

    Args:
        settings: Settings of the check.
        name: Name of the run folder.
        overrides: Overrides, as typed.
        launcher: Python options before the script, such as `-m torch.distributed.run`.
        limit_seconds: Time after which `subprocess.TimeoutExpired` is raised.
        limit_bytes: Limit on the run's address space; None for no limit.
    """
    folder = settings.folder / name
    command = [sys.executable, *launcher, str(ROOT / "train.py"), *overrides, f"hydra.run.dir={folder}"]
    paths = os.pathsep.join(str(ROOT / part) for part in ("benchmarks", "tests"))
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=settings.folder,
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if limit_bytes is not None:
        resource.prlimit(process.pid, resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    try:
        output, _ = process.communicate(timeout=limit_seconds)
    finally:
        process.kill()
    return Finished(code=process.returncode, output=output, folder=folder, seconds=time.monotonic() - began)


def fit_here(settings: Settings, name: str, overrides: Sequence[str], callbacks: Sequence[Callback] = ()) -> Run:
    """Train a run in this process and return it.

    Args:
        settings: Settings of the check.
        name: Name of the run folder.
        overrides: Overrides, as typed.
        callbacks: Callbacks to insert before all others.
    """
    folder = settings.folder / name
    folder.mkdir()
    composed, mistakes = compose_and_check([*overrides, f"hydra.run.dir={folder}"])
    assert composed is not None, [str(mistake) for mistake in mistakes]
    assert not mistakes, [str(mistake) for mistake in mistakes]
    open_console(folder / "train.log")
    run = build(replace(composed, run_folder=folder, overrides=list(overrides)))
    run.data.prepare_data()
    run.trainer.callbacks[:0] = callbacks  # type: ignore[attr-defined]
    run.trainer.fit(run.task, datamodule=run.data, ckpt_path=run.checkpoint, weights_only=True)
    return run


def wait_for_checkpoint(run_folder: Path, step: int, *, limit_seconds: float = 120.0) -> Path:
    """Wait until the checkpoint of a step is complete, and return its path.

    Raises:
        TimeoutError: The checkpoint is not complete in time.
    """
    folder = run_folder / CHECKPOINTS / f"step_{step:07d}.ckpt"
    ends = time.monotonic() + limit_seconds
    while not (folder / "manifest.json").is_file():
        if time.monotonic() > ends:
            raise TimeoutError(f"{folder.name} is not complete after {limit_seconds:.0f} s")
        time.sleep(0.01)
    return folder
