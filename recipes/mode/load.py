"""Load the weights of a checkpoint into a model, for the modes that do not train. Reads the checkpoint once."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from recipes.build import Run
from recipes.checkpoint.checkpoint_io import FIX_OF_A_FORGERY
from recipes.checkpoint.layout import select_weights
from recipes.checkpoint.shards import load_module
from recipes.data.datamodule import StreamDataModule
from recipes.engine import get_engine
from recipes.errors import ConfigError
from recipes.foreign_file import reading
from recipes.mode.start import get_checkpoint_io
from recipes.model.weights.text_side import load_exported_tokenizer
from recipes.numerics.ema import OPTIMIZER_AVERAGE
from recipes.runtime import status
from recipes.runtime.console import LOGGER
from recipes.runtime.failure import is_out_of_memory, is_peer_failure
from recipes.task.base import TrainingTask
from recipes.tokenizer import Tokenizer

_FIX_OF_OWN_CLASSES = (
    "the same command with the classes as they were when the run was made, or with ++task.module.<argument>=<value>"
    " where they differ by a default, or resume=<another run>"
)


def load_task(run: Run, weights: Literal["trained", "ema"], *, moves_data: bool = False) -> tuple[TrainingTask, Path]:
    """Return the run's task, its model on the device and in eval mode, and the checkpoint that was loaded.

    Args:
        run: A run with a checkpoint.
        weights: `trained`, or `ema` for their moving average.
        moves_data: Whether to move the data, which is prepared, to the position of the checkpoint.

    Raises:
        ConfigError: There is no checkpoint (`resume=auto` in a folder without one), or no average in it.
    """
    checkpoint = require_checkpoint(run)
    task = run.task
    task.trainer = run.trainer
    with run.trainer.precision_plugin.module_init_context():
        task.configure_model()
    status.say(f"reading {checkpoint.name}")
    with restoring(run):
        state = get_engine(run.trainer).load_checkpoint(checkpoint)
        optimizer_state = state["optimizer_states"][0]["state"]
        if weights == "trained" and any(OPTIMIZER_AVERAGE in of_parameter for of_parameter in optimizer_state.values()):
            LOGGER.info("This run's optimizer averages the weights; to use that average, set mode.weights=ema")
        state_dict = select_weights(state, weights, setting="mode.weights=ema", fix="mode.weights=trained")
        task.on_load_checkpoint(state)
        load_module(task, state_dict)
        if isinstance(run.data, StreamDataModule):
            of_data = state[type(run.data).__qualname__]
            run.data.restore_names(of_data)
            if moves_data:
                run.data.restore_position(of_data)
    loaded_path = get_checkpoint_io(run).loaded  # may be an older one: damaged checkpoints are skipped
    assert loaded_path is not None
    return task.eval(), loaded_path


def require_checkpoint(run: Run) -> Path:
    """Return the checkpoint of a run.

    Raises:
        ConfigError: There is none: `resume=auto` in a folder without one.
    """
    if run.checkpoint is None:
        reason = f"{run.folder} holds no complete checkpoint"
        raise ConfigError("resume=auto", reason, "resume=<a run that saved one>")
    return run.checkpoint


@contextmanager
def restoring(
    run: Run, folder: Path | None = None, *, setting: str | None = None, fix: str | None = None
) -> Iterator[None]:
    """Report what the state of a checkpoint makes anybody raise as an error in it; the traceback is in the log.

    Hashes show damage, and anybody can compute them: the state of a forged checkpoint may have any form.

    Args:
        run: The run that is restored.
        folder: What is read; None: the checkpoint that was loaded.
        setting: The override that named it; None is `resume=` with the folder.
        fix: What to type instead; None: another checkpoint, or the LightningModule that it was trained with.

    Raises:
        ConfigError: The state has another form than this version writes.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if is_out_of_memory(error) or is_peer_failure(error):
            raise
        LOGGER.error(traceback.format_exc(), extra={"console": False})
        read = folder or get_checkpoint_io(run).loaded or run.checkpoint
        assert read is not None, "something is restored"
        fix = fix or (_FIX_OF_OWN_CLASSES if run.has_own_training else FIX_OF_A_FORGERY)
        with reading(read, setting or f"resume={read}", fix):
            raise


def load_tokenizer(run: Run, typed: str) -> Tokenizer:
    """Return the tokenizer that the run was started with, from its folder.

    Args:
        run: A run with a checkpoint.
        typed: Override that needs it, such as `mode=sample`, for the error message.

    Raises:
        ConfigError: The run's data is not text.
    """
    if not run.tokenizer_folder.is_dir():
        reason = "the data of that run is not text: it has no tokenizer"
        raise ConfigError(f"{typed} resume={run.folder}", reason, "resume=<a run on text>")
    return load_exported_tokenizer(run.tokenizer_folder, run.published)
