"""Loss, and perplexity or accuracy, of a checkpoint on a whole split. One pass over the split."""

import json
from typing import Literal

from recipes.build import Run
from recipes.mode.load import load_task
from recipes.runtime.console import LOGGER


def evaluate(
    run: Run, *, split: Literal["train", "val"], weights: Literal["trained", "ema"]
) -> int:
    """Evaluate and print; the numbers also go to `evaluate_<split>.json` in the run folder.

    Args:
        run: With a checkpoint to evaluate.
        split: Which part of the data.
        weights: Those that were trained, or their average.
    """
    task, checkpoint = load_task(run, weights)
    run.data.trainer = run.trainer
    run.data.prepare_data()
    [metrics] = run.trainer.validate(
        task, dataloaders=run.data.split_dataloader(split), verbose=False
    )
    results = {name.removeprefix("val/"): value for name, value in metrics.items()}
    num_samples = len(run.data.source.train() if split == "train" else run.data.source.val())
    what = {
        "data": run.data.source.fingerprint,
        "split": split,
        "samples": num_samples,
        "weights": weights,
    }
    record = {"checkpoint": str(checkpoint)} | what | results
    (run.folder / f"evaluate_{split}.json").write_text(json.dumps(record, indent=2) + "\n")
    shown = ", ".join(f"{name} {value:.4f}" for name, value in results.items())
    LOGGER.info(f"{checkpoint} on the {num_samples:,} samples of {split}: {shown}")
    return 0
