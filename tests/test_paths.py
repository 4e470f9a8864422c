"""How many files a newcomer reads to follow a step: from a batch on disk to the optimizer, from the norm to its row."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from support import composed_config, read_metrics, resolved

from recipes.build import build

ROOT = Path(__file__).parent.parent
OURS = (f"{ROOT}/recipes/", f"{ROOT}/callbacks/")
STEP = 4  # neither the first one, which sets things up, nor the last one
# docs/how/step.md lists them
TO_THE_OPTIMIZER = {
    "recipes/data/batches.py",
    "recipes/data/text/sequences.py",
    "recipes/loss/__init__.py",
    "recipes/model/decoder.py",
    "recipes/model/gpt2.py",
    "recipes/numerics/head_loss.py",
    "recipes/numerics/linear.py",
    "recipes/parallel/stages.py",
    "recipes/strategy/torch_native.py",
    "recipes/task/base.py",
    "recipes/task/language_modeling.py",
}
FROM_NORM_TO_ROW = [
    ("recipes/strategy/torch_native.py", "clip_gradients"),
    ("callbacks/grad_norm/callback.py", "on_train_batch_end"),
    ("callbacks/logged_step.py", "log_row"),
    ("recipes/logger/csv.py", "log_metrics"),
]


Trace = tuple[list[tuple[str, str]], int]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Return every (file, function) of ours that a step enters, in order, and how many of them until its update."""
    folder = tmp_path_factory.mktemp("run")
    sizes = ("model=gpt2_nano", "model.num_layers=2", "model.hidden_size=32", "model.num_heads=2")
    counts = (
        "model.max_seq_len=32",
        "global_batch_size=4",
        "micro_batch_size=4",
        "eval_samples=4",
        "trainer.max_steps=8",
        "log_every=1",
    )
    config = composed_config(*sizes, *counts, "callbacks=[grad_norm]", "trainer.accelerator=cpu", "trainer.devices=1")
    run = build(resolved(config, folder))
    entered: list[tuple[str, str]] = []
    num_until_update: list[int] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(OURS):
            entered.append((file.removeprefix(f"{ROOT}/"), frame.f_code.co_name))

    loop = run.trainer.fit_loop.epoch_loop
    advance, update = loop.advance, torch.optim.AdamW.step

    def traced_advance(*arguments: Any) -> None:
        sys.setprofile(profile if run.trainer.global_step == STEP else None)
        try:
            advance(*arguments)
        finally:
            sys.setprofile(None)

    def traced_update(*arguments: Any, **options: Any) -> Any:
        result = update(*arguments, **options)
        if sys.getprofile() is not None:
            num_until_update.append(len(entered))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "advance", traced_advance)
        patch.setattr(torch.optim.AdamW, "step", traced_update)
        run.trainer.fit(run.task, datamodule=run.data)
    assert "grad/norm" in read_metrics(folder)[STEP]
    [until_update] = num_until_update
    return entered, until_update


def test_a_batch_crosses_eleven_files_from_the_disk_to_the_optimizer(traced: Trace) -> None:
    entered, until_update = traced
    # beside the way of the batch, hooks of callbacks: rows, checkpoints, and what Lightning is asked for them
    aside = ("callbacks/", "recipes/logger/", "recipes/checkpoint/", "recipes/lightning_internals.py")
    # and a wait for data is registered, for a signal that would have to end it
    aside += ("recipes/runtime/signals.py", "recipes/data/loader_process.py")
    # task.engine is the strategy of the Trainer, one line away
    aside += ("recipes/engine.py", "recipes/task/resumable.py")
    # the loss of a logged step is summed over ranks for its row
    of_row = {"recipes/strategy/mesh_ranks.py", "recipes/numerics/collectives.py"}
    files = {file for file, _ in entered[:until_update] if not file.startswith(aside)} - of_row
    assert files == TO_THE_OPTIMIZER
    assert len(files) <= 11


def test_a_gradient_norm_crosses_four_files_to_its_row(traced: Trace) -> None:
    entered, _ = traced
    positions = [entered.index(place) for place in FROM_NORM_TO_ROW]
    assert positions == sorted(positions)
