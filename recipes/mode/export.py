"""Weights in Hugging Face's format, read back and compared before it says done. One write and one read."""

from pathlib import Path
from typing import Literal

from recipes.build import Run
from recipes.mode.load import load_task
from recipes.model.weights.huggingface import export_pretrained
from recipes.runtime.console import LOGGER


def export(run: Run, *, path: str | None, weights: Literal["trained", "ema"]) -> int:
    """Write a folder that `transformers` loads.

    Args:
        run: With a checkpoint of a language model.
        path: The folder; None: `export` in the run folder.
        weights: Those that were trained, or their average.
    """
    task, checkpoint = load_task(run, weights)
    folder = Path(path) if path is not None else run.folder / "export"
    tokenizer = run.tokenizer_folder
    export_pretrained(
        task.model, folder, tokenizer_folder=tokenizer if tokenizer.is_dir() else None
    )
    LOGGER.info(f"Exported {checkpoint} to {folder}; every tensor read back and equal")
    return 0
