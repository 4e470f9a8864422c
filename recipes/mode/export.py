"""Export weights in Hugging Face format and verify them. Writes and reads every tensor once."""

from typing import Literal

from recipes.build import Run
from recipes.mode.load import load_task
from recipes.model.weights import restore_precision
from recipes.model.weights.adapter import has_adapter, merge_adapter
from recipes.model.weights.huggingface import export_pretrained
from recipes.model.weights.peft_folder import save_adapter
from recipes.run_folder import claim_output
from recipes.runtime.console import LOGGER
from recipes.task.base import TrainingTask


def export(
    run: Run, *, path: str | None, weights: Literal["trained", "ema"], adapter: Literal["merged", "separate"]
) -> int:
    """Write a folder that `transformers` loads.

    Args:
        run: A run with a checkpoint of a language model.
        path: Folder to write; None is `export` in the run folder.
        weights: `trained`, or `ema` for their moving average.
        adapter: How to export an adapter: `merged` into the base weights, or `separate` in peft's format.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: There is no checkpoint, or no average in it, or the folder cannot be written to.
    """
    folder = (
        claim_output(path, "mode.path") if path is not None else claim_output(run.folder / "export", "hydra.run.dir")
    )
    task, checkpoint = load_task(run, weights)
    tokenizer = run.tokenizer_folder
    if has_adapter(task.model):
        if adapter == "separate":
            save_adapter(task.model, folder)
            LOGGER.info(f"Exported the adapter of {checkpoint} to {folder}, for peft")
            return 0
        _restore_base(task)
        merge_adapter(task.model)
    export_pretrained(task.model, folder, tokenizer_folder=tokenizer if tokenizer.is_dir() else None)
    LOGGER.info(f"Exported {checkpoint} to {folder}; every tensor was read back and is equal")
    return 0


def _restore_base(task: TrainingTask) -> None:
    """Restore the unquantized base weights: merging into NF4 weights would round once more."""
    difference = restore_precision(task.model, task.seed)  # type: ignore[arg-type]
    if difference is not None:
        LOGGER.info(
            "The adapter was trained beside weights in NF4, and is merged into those that they were rounded from:"
            f" the difference has {difference:.2%} of their norm"
        )
