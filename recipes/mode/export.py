"""Export weights in Hugging Face format and verify them. Writes and reads every tensor once."""

from typing import Literal

from recipes.adapter.nf4_base import dequantize_base
from recipes.build import Run
from recipes.errors import ConfigError
from recipes.files import filling
from recipes.mode.load import load_task
from recipes.model.weights import restore_precision
from recipes.model.weights.adapter import has_adapter, merge_adapter
from recipes.model.weights.files import published_folder
from recipes.model.weights.huggingface import export_pretrained
from recipes.model.weights.peft_folder import save_adapter
from recipes.model.weights.text_side import EXPORT_FILES, load_exported_tokenizer, write_text_side
from recipes.numerics.nf4 import list_nf4
from recipes.run_folder import claim_output
from recipes.runtime.console import LOGGER
from recipes.task.base import TrainingTask


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
            the folder cannot be written to or holds the published model.
    """
    setting, target = ("mode.path", path) if path is not None else ("hydra.run.dir", run.folder / "export")
    folder = claim_output(target, setting)
    source = None if run.published is None else published_folder(run.published)
    if source is not None and folder.resolve() == source.resolve():
        reason = "it holds the published model that the run started from, which the export would replace"
        raise ConfigError(f"{setting}={target}", reason, "mode.path=<another folder>")
    task, checkpoint = load_task(run, weights)
    tokenizer_folder = run.tokenizer_folder if run.tokenizer_folder.is_dir() else None
    what = str(checkpoint)
    if has_adapter(task.model) and adapter == "separate":
        what = f"the adapter of {checkpoint}, for peft,"
        if any(list_nf4(task.model)):
            LOGGER.info(
                "The adapter was trained beside weights in NF4, and matches training only on top of the NF4 base"
            )
        tokenizer = None if tokenizer_folder is None else load_exported_tokenizer(tokenizer_folder, run.published)
        with filling(folder, owned=EXPORT_FILES) as unfinished:
            save_adapter(task.model, unfinished)
            write_text_side(unfinished, tokenizer=tokenizer, published=run.published)
    else:
        if has_adapter(task.model):
            _restore_base(task, exactly=adapter == "merged")
            merge_adapter(task.model)
        export_pretrained(task.model, folder, tokenizer_folder=tokenizer_folder, published=run.published)
    LOGGER.info(f"Exported {what} to {folder}; every file was read back and is equal")
    return 0


def _restore_base(task: TrainingTask, *, exactly: bool) -> None:
    """Give the base weights of an adapter in NF4 the dtype of the run.

    Args:
        task: Task with an adapter.
        exactly: Keep their values, beside which the adapter was trained; False: take those from before quantization.
    """
    if exactly:
        dequantize_base(task.model)
        return
    difference = restore_precision(task.model, task.seed)  # type: ignore[arg-type]
    if difference is not None:
        LOGGER.info(
            "The adapter was trained beside weights in NF4, and is merged into those that they were rounded from:"
            f" the difference has {difference:.2%} of their norm"
        )
