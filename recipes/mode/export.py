"""Export weights in Hugging Face format and verify them. Writes and reads every tensor once."""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

from recipes.adapter.nf4_base import dequantize_base
from recipes.build import Run
from recipes.config.traits import declare_mode
from recipes.errors import ConfigError
from recipes.files import filling, write_atomically
from recipes.mode.load import load_task
from recipes.model.weights import restore_precision
from recipes.model.weights.adapter import has_adapter, merge_adapter
from recipes.model.weights.files import published_folder
from recipes.model.weights.huggingface import export_pretrained
from recipes.model.weights.peft_folder import save_adapter
from recipes.model.weights.text_side import (
    EXPORT_FILES,
    EXPORT_RECORD,
    list_further_files,
    load_exported_tokenizer,
    write_text_side,
)
from recipes.numerics.nf4 import list_nf4
from recipes.run_folder import (
    CHECKPOINTS,
    EVENTS_FILE,
    EXPORT_FOLDER,
    claim_output,
    complete_lines,
    read_json,
)
from recipes.runtime import status
from recipes.runtime.console import LOGGER
from recipes.task.base import TrainingTask

_CONFIGS = ("config.json", "adapter_config.json")


@declare_mode(needs_checkpoint=True, needs="export", writes="export")
def export(
    run: Run,
    *,
    path: str | None,
    weights: Literal["trained", "ema"],
    adapter: Literal["merged", "merged_unquantized", "separate"],
) -> int:
    """Write a folder that `transformers` loads, with everything that `mode=sample` goes by.

    Args:
        run: A run with a checkpoint of a language model.
        path: Folder to write; None is `export` in the run folder.
        weights: `trained`, or `ema` for their moving average.
        adapter: How to export an adapter: `merged` into the weights that it was trained beside, dequantized if those
            were in NF4; `merged_unquantized` into the weights from before quantization; or `separate` in peft's format.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: There is no checkpoint, or no average in it, transformers cannot load the tokenizer as it was, or
            the folder cannot be written to or holds files of something else.
    """
    target = path if path is not None else str(run.folder / EXPORT_FOLDER)
    setting = f"mode.path={target}"
    folder = claim_output(target, "mode.path")
    source = None if run.published is None else published_folder(run.published)
    if source is not None and folder.resolve() == source.resolve():
        reason = "it holds the published model that the run started from, which the export would replace"
        raise ConfigError(setting, reason, "mode.path=<another folder>")
    if folder.resolve().is_relative_to((run.folder / CHECKPOINTS).resolve()):
        reason = "the checkpoints of the run are there, and their folders hold nothing else"
        raise ConfigError(setting, reason, "mode.path=<another folder>")
    if (foreign := _find_foreign(folder, run, source)) is not None:
        reason = f"it holds {foreign.name}, which is not of an export of this run: it would be replaced"
        raise ConfigError(setting, reason, "mode.path=<another folder>")
    task, checkpoint = load_task(run, weights)
    tokenizer_folder = run.tokenizer_folder if run.tokenizer_folder.is_dir() else None
    what = str(checkpoint)
    if has_adapter(task.model) and adapter == "separate":
        what = f"the adapter of {checkpoint}, for peft,"
        if any(list_nf4(task.model)):
            LOGGER.info(
                "The adapter was trained on NF4-quantized weights, and matches training only on top of the NF4 base"
            )
        tokenizer = None if tokenizer_folder is None else load_exported_tokenizer(tokenizer_folder, run.published)
        with filling(folder, owned=EXPORT_FILES) as unfinished:
            save_adapter(task.model, unfinished)
            write_text_side(unfinished, tokenizer=tokenizer, published=run.published)
    else:
        if has_adapter(task.model):
            _restore_base(task, exactly=adapter == "merged")
            merge_adapter(task.model)
        status.say(f"writing {folder}, and reading it back")
        export_pretrained(task.model, folder, tokenizer_folder=tokenizer_folder, published=run.published)
    record = _describe(folder, run) | {"checkpoint": checkpoint.name}
    write_atomically(folder / EXPORT_RECORD, json.dumps(record, indent=2) + "\n")
    LOGGER.info(f"Exported {what} to {folder}; every file was read back and is equal")
    return 0


def _find_foreign(folder: Path, run: Run, source: Path | None) -> Path | None:
    """Return a file that an export would replace and that no earlier export of this run wrote; None if there is none.

    Args:
        folder: Folder of the export.
        run: The run.
        source: Published model whose further files go with the export; None if there is none.
    """
    record = folder / EXPORT_RECORD
    if record.is_file():
        with suppress(ConfigError):  # another program's file of that name is in the way, too
            if read_json(record, fix="").items() >= _describe(folder, run).items():
                return None
    written = [*EXPORT_FILES, EXPORT_RECORD, *(path.name for path in list_further_files(source))]
    return next((path for pattern in written for path in sorted(folder.glob(pattern))), None)


def _describe(folder: Path, run: Run) -> dict[str, str | None]:
    """Return by what an export is known again: its run, wherever that is moved, and its config as it was written."""
    home = run.folder if run.checkpoint is None else run.checkpoint.resolve().parents[1]
    first = next(iter(complete_lines(home / EVENTS_FILE)), "")  # with the time of its start
    name = first.encode() or os.fsencode(home.resolve())  # hashed: no path of this machine is published
    config = next((folder / name for name in _CONFIGS if (folder / name).is_file()), None)
    return {
        "run": hashlib.sha256(name).hexdigest(),
        "config": None if config is None else hashlib.sha256(config.read_bytes()).hexdigest(),
    }


def _restore_base(task: TrainingTask, *, exactly: bool) -> None:
    """Give the base weights of an adapter in NF4 the dtype of the run.

    Args:
        task: Task with an adapter.
        exactly: Keep their values, beside which the adapter was trained; False: take those from before quantization.
    """
    if exactly:
        dequantize_base(task.model)
        return
    difference = restore_precision(task.model, task.seed)
    if difference is not None:
        LOGGER.info(
            "The adapter was trained on NF4-quantized weights, and is merged into the original ones:"
            f" the difference has {difference:.2%} of their norm"
        )
