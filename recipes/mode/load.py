"""The weights of a checkpoint in a model ready to be asked. One read of the checkpoint."""

from pathlib import Path
from typing import Any, Literal

from recipes.build import Run
from recipes.checkpoint.checkpoint_io import FolderCheckpointIO
from recipes.checkpoint.shards import load_module
from recipes.errors import ConfigError
from recipes.numerics.ema import NAME as AVERAGE
from recipes.task.base import TrainingTask
from recipes.tokenizer import Tokenizer


def load_task(run: Run, weights: Literal["trained", "ema"]) -> tuple[TrainingTask, Path]:
    """The run's task with its model on the device, in eval mode, and the checkpoint its weights are of.

    Args:
        run: With a checkpoint.
        weights: Those that were trained, or their average.

    Raises:
        ConfigError: There is no checkpoint (`resume=auto` in a folder without one), or no average in it.
    """
    if run.checkpoint is None:
        raise ConfigError(
            "resume=auto",
            f"{run.folder} holds no whole checkpoint",
            "resume=<a run that saved one>",
        )
    task = run.task
    task.trainer = run.trainer
    with run.trainer.precision_plugin.module_init_context():
        task.configure_model()
    state = run.trainer.strategy.load_checkpoint(run.checkpoint)
    saved = state["state_dict"] if weights == "trained" else _average(state)
    task.on_load_checkpoint(state)
    load_module(task, saved)
    io = run.trainer.strategy.checkpoint_io
    assert isinstance(io, FolderCheckpointIO)
    assert io.loaded is not None
    return task.eval(), io.loaded


def _average(state: dict[str, Any]) -> dict[str, Any]:
    """Every tensor of the model, the average where there is one: buffers and what is not trained have none."""
    moments = state["optimizer_states"][0]["state"]
    average = {
        name: moments[index][AVERAGE]
        for index, name in enumerate(state["parameters"])
        if AVERAGE in moments.get(index, {})
    }
    if not average:
        raise ConfigError(
            "mode.weights=ema",
            "the checkpoint holds no average of the weights: its run was trained without ema_decay",
            "mode.weights=trained",
        )
    tied = {name: average[other] for name, other in state["tied"].items() if other in average}
    whole: dict[str, Any] = state["state_dict"] | average | tied
    return whole


def load_tokenizer(run: Run) -> Tokenizer | None:
    """The tokenizer the run began with, from that run's folder; None where the data is not text."""
    return Tokenizer.load(run.tokenizer_folder) if run.tokenizer_folder.is_dir() else None
