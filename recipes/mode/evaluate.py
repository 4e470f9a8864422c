"""Evaluate a checkpoint on a split: loss and metrics. One forward pass over the whole split."""

import json
from typing import Literal

from lightning.pytorch.callbacks import Callback

from recipes.build import Run
from recipes.mode.load import load_task
from recipes.runtime.console import LOGGER
from recipes.task.language_modeling import LanguageModeling


def evaluate(
    run: Run, *, split: Literal["train", "val"], weights: Literal["trained", "ema"], answers: Callback | None
) -> int:
    """Print the metrics of a checkpoint and write them to `evaluate_<split>.json` in the run folder.

    Args:
        run: A run with a checkpoint.
        split: The part of the data to evaluate on.
        weights: `trained`, or `ema` for their moving average.
        answers: Checks answers to validation questions, where the data has some; None: they are not asked.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: There is no checkpoint, or no average in it.
    """
    task, checkpoint = load_task(run, weights)
    run.data.trainer = run.trainer
    run.data.prepare_data()
    if isinstance(task, LanguageModeling) and answers is not None and split == "val":
        task.source, task.tokenizer = run.data.source, run.data.source.tokenizer
        run.trainer.callbacks.append(answers)  # type: ignore[attr-defined]
    further = run.data.eval_names if split == "val" else []
    task.name_data(sources=getattr(run.data.source, "source_names", ()), further=further)
    by_loader = run.trainer.validate(task, dataloaders=run.data.split_dataloaders(split), verbose=False)
    results = {name.removeprefix("val/"): value for metrics in by_loader for name, value in metrics.items()}
    num_samples = len(run.data.source.train() if split == "train" else run.data.source.val())
    record = {
        "checkpoint": str(checkpoint),
        "data": run.data.source.fingerprint,
        "split": split,
        "samples": num_samples,
        "weights": weights,
    }
    text = json.dumps(record | results, indent=2) + "\n"
    (run.folder / f"evaluate_{split}.json").write_text(text, encoding="utf-8")
    shown = ", ".join(f"{name} {value:.4f}" for name, value in results.items())
    LOGGER.info(f"{checkpoint} on the {num_samples:,} samples of {split}: {shown}")
    return 0
