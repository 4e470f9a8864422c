"""The weights of a checkpoint in a model ready to be asked. One read of the checkpoint."""

from recipes.build import Run
from recipes.checkpoint.folder_io import FolderCheckpointIO
from recipes.mistake import Mistake
from recipes.task.learning import LearningTask
from recipes.tokenizer import Tokenizer


def load_task(run: Run) -> LearningTask:
    """The run's task with its model on the device, in eval mode.

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
    state = FolderCheckpointIO().load_checkpoint(run.checkpoint)
    task.on_load_checkpoint(state)
    task.load_state_dict(state["state_dict"])
    return task.eval()


def load_tokenizer(run: Run) -> Tokenizer | None:
    """The tokenizer the run began with, from that run's folder; None where the data is not text."""
    return Tokenizer.load(run.tokenizer_folder) if run.tokenizer_folder.is_dir() else None
