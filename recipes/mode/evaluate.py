"""Evaluate a checkpoint once on a whole split, or with an evaluator on its own tasks."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import lightning.pytorch as lightning
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from recipes.build import Run
from recipes.config.traits import declare_mode
from recipes.errors import ConfigError
from recipes.evaluator import Evaluator
from recipes.files import write_atomically
from recipes.lightning_internals import get_callbacks
from recipes.mode import own_module
from recipes.mode.load import load_task, load_tokenizer
from recipes.run_folder import (
    METRICS_FILE,
    SUMMARY_FILE,
    add_evaluations,
    claim_output,
    has_keys,
    has_run,
    is_summary,
    read_summary,
)
from recipes.runtime import status
from recipes.runtime.console import LOGGER
from recipes.task.image_text import ImageText
from recipes.task.language_modeling import LanguageModeling

Weights = Literal["trained", "ema"]
Compared = Literal["trained", "ema", "both"]
Split = Literal["train", "val", "test"]


class _ShowBatches(Callback):
    """Says on a terminal how far the evaluation is."""

    @override
    def on_validation_batch_start(
        self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        totals = trainer.num_val_batches
        of = f"{batch_idx + 1:,} of {totals[dataloader_idx]:,}"
        status.say(f"batch {of}" + (f", part {dataloader_idx + 1} of {len(totals)}" if len(totals) > 1 else ""))


@declare_mode(needs_checkpoint=True, reads_data=True, takes_evaluator=True, takes_own_training=True)
def evaluate(
    run: Run,
    *,
    split: Split,
    weights: Compared,
    answers: Callback | None,
    classes: Any,
    retrieved: Callback | None,
    zero_shot: Callback | None,
    page: Callable[[Path], None],
    evaluator: Evaluator | Mapping[str, Any] | None,
) -> int:
    """Print the metrics of a checkpoint, and write them to `evaluate_….json` and summary.json in the run folder.

    Args:
        run: A run with a checkpoint.
        split: Split of the data to evaluate on.
        weights: `trained`, `ema` for their moving average, or `both`, whose metrics are beside each other.
        answers: Checks answers to validation questions, if the data has any; None skips them.
        classes: Counts which classes are taken for which, with the trained weights if there are both; None: not.
        retrieved: Writes what some images and captions find, with these weights; None: not.
        zero_shot: Classifies further images by the names of their classes, with each of the weights; None: not.
        page: Writes the page of the run folder again, if it is that of a run.
        evaluator: Evaluates on its own tasks instead of the split; empty evaluates the split.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: There is no checkpoint, or no average in it, the evaluator does not support its settings, or the
            run folder cannot be written to.
    """
    chosen = cast(Evaluator | None, evaluator or None)
    name = split if chosen is None else chosen.name
    # in another folder than the run's own, typed, these may be of something else
    written = {SUMMARY_FILE: is_summary, _file_name(name): has_keys("checkpoint")}
    claim_output(run.folder, "hydra.run.dir", replaces=None if has_run(run.folder) else written)
    read_summary(run.folder)  # before the work: results are added to it
    if run.has_own_training:
        _evaluate_own(run, split)
    elif chosen is not None:
        if weights == "both":
            reason = "an evaluator evaluates one of them at a time"
            raise ConfigError(f"mode.weights=both evaluator={name}", reason, "mode.weights=trained, or ema")
        _evaluate_tasks(run, chosen, weights)
    else:
        _evaluate_split(run, split, weights, answers, classes, retrieved, zero_shot)
    if (run.folder / METRICS_FILE).is_file():
        page(run.folder)
    return 0


@declare_mode(needs_checkpoint=True, reads_data=True, takes_own_training=True)
def test(run: Run, *, weights: Compared, classes: Any, retrieved: Callback | None, page: Callable[[Path], None]) -> int:
    """Print the metrics of a checkpoint on the test split, and write them as `evaluate` does.

    Args:
        run: A run with a checkpoint, on data with a test split.
        weights: See `evaluate`.
        classes: See `evaluate`.
        retrieved: See `evaluate`.
        page: See `evaluate`.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: There is no checkpoint, no average in it or no test split, or the run folder cannot be written to.
    """
    further: dict[str, Any] = {"answers": None, "zero_shot": None, "evaluator": None}
    return evaluate(run, split="test", weights=weights, classes=classes, retrieved=retrieved, page=page, **further)


def _evaluate_split(
    run: Run,
    split: Split,
    weights: Compared,
    answers: Callback | None,
    classes: Any,
    retrieved: Callback | None,
    zero_shot: Callback | None,
) -> None:
    kinds: tuple[Weights, ...] = ("trained", "ema") if weights == "both" else (weights,)
    task, checkpoint = load_task(run, kinds[-1])  # the average first: without one, nothing is evaluated in vain
    # a run has trained on no part of another text: all of it is validation data
    whole = hold_out_other_data(run) if split == "val" else []
    run.data.trainer = run.trainer
    run.data.prepare_split(split)
    if isinstance(task, LanguageModeling) and answers is not None and split == "val" and "generate" in task.supports:
        task.source, task.tokenizer = run.data.source, run.data.source.tokenizer
        get_callbacks(run.trainer).append(answers)
    if isinstance(task, ImageText):
        task.data = run.data
        if zero_shot is not None:
            get_callbacks(run.trainer).append(zero_shot)
    get_callbacks(run.trainer).append(_ShowBatches())
    further = run.data.eval_names if split == "val" else []
    task.name_data(sources=getattr(run.data.source, "source_names", ()), further=further)
    num_samples = len(run.data.get_split(split))
    part = _describe_part(run, split, whole, num_samples)
    results: dict[Weights, dict[str, float]] = {}
    for kind in reversed(kinds):
        if results:
            load_task(run, kind)
        if kind == kinds[0] and classes is not None:
            classes.class_names = run.data.class_names
            get_callbacks(run.trainer).append(classes)
        if kind == kinds[0] and retrieved is not None:
            get_callbacks(run.trainer).append(retrieved)
        by_loader = run.trainer.validate(task, dataloaders=run.data.split_dataloaders(split), verbose=False)
        results[kind] = {name.removeprefix("val/"): value for metrics in by_loader for name, value in metrics.items()}
        shown = f"{checkpoint}{f', {kind} weights,' if len(kinds) > 1 else ''} on {part}"
        LOGGER.info(f"{shown}: {_list_metrics(results[kind])}")
    run.data.log_skipped()
    record = {
        "checkpoint": str(checkpoint),
        "data": run.data.source.fingerprint,
        "split": split,
        "whole": whole,
        "samples": num_samples,
        "weights": kinds[0],
    }
    beside = {kind: results[kind] for kind in kinds[1:]}
    _write(run, split, record | results[kinds[0]] | beside)
    described = {"checkpoint": checkpoint.name, "data": run.data.source.fingerprint}
    names = {kind: split if kind == kinds[0] else f"{split}/{kind}" for kind in kinds}
    add_evaluations(run.folder, {names[kind]: {**described, "weights": kind, **results[kind]} for kind in kinds})


def _evaluate_own(run: Run, split: Split) -> None:
    results, checkpoint = own_module.measure(run, split)
    LOGGER.info(f"{checkpoint} on {split}: {_list_metrics(results) or 'its step logged nothing'}")
    _write(run, split, {"checkpoint": str(checkpoint), "split": split, "weights": "trained"} | results)
    add_evaluations(run.folder, {split: {"checkpoint": checkpoint.name, "weights": "trained"} | results})


def _describe_part(run: Run, split: Split, whole: Sequence[str], num_samples: int) -> str:
    """Return which part of which data was evaluated."""
    is_whole = "data" in whole
    part = f"all {num_samples:,} samples of the data" if is_whole else f"the {num_samples:,} samples of {split}"
    if not is_whole and split != "test" and not hasattr(run.data.source, "prepare_split"):  # parts of one data
        other = run.data.source.val() if split == "train" else run.data.source.train()
        part += f", {num_samples / (num_samples + len(other)):.2g} of the data"
    if others := [name for name in whole if name != "data"]:
        part += f", and all of {', '.join(others)}"
    return part


def hold_out_other_data(run: Run) -> list[str]:
    """Make the data that is not the run's own validation data as a whole; return the names of those nodes."""
    sources = {"data": run.data.source} | {f"eval_data.{name}": one for name, one in run.data.eval_sources.items()}
    # a mixture has none: its parts say how much of each is read
    whole = {name: hold_out for name in run.other_data if (hold_out := getattr(sources[name], "hold_out_all", None))}
    for hold_out in whole.values():
        hold_out()
    return list(whole)


def _evaluate_tasks(run: Run, evaluator: Evaluator, weights: Weights) -> None:
    evaluator.prepare()
    tokenizer = load_tokenizer(run, f"evaluator={evaluator.name}")
    task, checkpoint = load_task(run, weights)
    assert isinstance(task, LanguageModeling), "the config check admits only language models"
    record = evaluator.evaluate(task, tokenizer)
    described = {"checkpoint": checkpoint.name, "weights": weights}
    evaluations = {}
    for name, result in record["tasks"].items():
        metrics = {metric: found["value"] for metric, found in result["metrics"].items()}
        evaluations[name] = described | metrics
        errors = {metric: found["stderr"] for metric, found in result["metrics"].items()}
        LOGGER.info(f"{checkpoint} on {name}: {_list_metrics(metrics, errors)}")
    _write(run, evaluator.name, {"checkpoint": str(checkpoint), "weights": weights} | record)
    add_evaluations(run.folder, evaluations)


def _write(run: Run, name: str, record: Mapping[str, Any]) -> None:
    write_atomically(run.folder / _file_name(name), json.dumps(record, indent=2) + "\n")


def _file_name(name: str) -> str:
    return f"evaluate_{name}.json"


def _list_metrics(metrics: Mapping[str, float | None], errors: Mapping[str, float | None] | None = None) -> str:
    """Format metrics as text, with standard errors where known."""
    shown = {name: "unknown" if value is None else f"{value:.4f}" for name, value in metrics.items()}
    known = {name: f" ± {error:.4f}" for name, error in (errors or {}).items() if error is not None}
    return ", ".join(f"{name} {value}{known.get(name, '')}" for name, value in shown.items())
