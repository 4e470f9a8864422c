"""The weights of a checkpoint in a model ready to be asked. One read of the checkpoint."""

from pathlib import Path

from recipes.build import Run
from recipes.checkpoint.folder_io import FolderCheckpointIO
from recipes.checkpoint.parts import load_module
from recipes.mistake import Mistake
from recipes.task.learning import LearningTask
from recipes.tokenizer import Tokenizer


def load_task(run: Run) -> tuple[LearningTask, Path]:
    """The run's task with its model on the device, in eval mode, and the checkpoint its weights are of.

    Raises:
        Mistake: There is no checkpoint (`resume=auto` in a folder without one).
    """
    if run.checkpoint is None:
        raise Mistake(
            "resume=auto",
            f"{run.folder} holds no whole checkpoint",
            "resume=<a run that saved one>",
        )
    task = run.task
    task.trainer = run.trainer
    with run.trainer.precision_plugin.module_init_context():
        task.configure_model()
    state = run.trainer.strategy.load_checkpoint(run.checkpoint)
    task.on_load_checkpoint(state)
    load_module(task, state["state_dict"])
    io = run.trainer.strategy.checkpoint_io
    assert isinstance(io, FolderCheckpointIO)
    assert io.loaded is not None
    return task.eval(), io.loaded


def load_tokenizer(run: Run) -> Tokenizer | None:
    """The tokenizer the run began with, from that run's folder; None where the data is not text."""
    return Tokenizer.load(run.tokenizer_folder) if run.tokenizer_folder.is_dir() else None
