"""Export a model and verify it: for transformers, timm or `lr.load`, or as an ONNX graph; push it to the hub.

Every tensor is written and read once. A model whose class transformers knows has its layout; any other one is a file of
safetensors and the settings with which it is constructed again.
"""

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from recipes.adapter.nf4_base import dequantize_base
from recipes.build import Run
from recipes.config.traits import declare_mode
from recipes.errors import ConfigError
from recipes.files import filling, write_atomically
from recipes.mode.export.card import CARD_FILE, make_card
from recipes.mode.export.hub import check_token, push
from recipes.mode.export.onnx_file import write_onnx
from recipes.mode.export.record import (
    PEFT_REWARD_MODEL,
    REWARD_MODEL,
    check_loads,
    construct,
    describe_inputs,
    describe_model,
    describe_outputs,
    describe_preprocessing,
    find_example,
    find_pixels,
    format_record,
    make_example,
)
from recipes.mode.load import load_task
from recipes.model.score import drop_value, has_score
from recipes.model.timm_model import TimmModel
from recipes.model.weights import restore_precision
from recipes.model.weights.adapter import has_adapter, merge_adapter
from recipes.model.weights.any_module import list_weights, save_weights
from recipes.model.weights.dtypes import DTYPES, convert_parameters, find_dtype
from recipes.model.weights.files import published_folder
from recipes.model.weights.hf_reward import check_classifier, choose_padding, export_reward_model
from recipes.model.weights.huggingface import export_pretrained, why_no_format
from recipes.model.weights.peft_folder import list_saved, save_adapter
from recipes.model.weights.text_side import (
    EXPORT_FILES,
    list_further_files,
    load_exported_tokenizer,
    write_text_side,
)
from recipes.model.weights.timm_folder import export_folder, why_no_folder
from recipes.numerics.nf4 import list_nf4
from recipes.run_folder import (
    CHECKPOINTS,
    EVENTS_FILE,
    EXPORT_FOLDER,
    EXPORT_RECORD,
    claim_output,
    complete_lines,
    read_json,
)
from recipes.runtime import status
from recipes.runtime.console import LOGGER
from recipes.runtime.exit_codes import ExitCode
from recipes.task.base import TrainingTask
from recipes.tokenizer import TOKENIZER_FILE

_READ_BACK = "every file was read back and is equal"
_OF_PEFT = ("peft", PEFT_REWARD_MODEL)
_CONFIGS = ("config.json", "adapter_config.json")


@declare_mode(needs_checkpoint=True, needs="export", writes="export")
def export(
    run: Run,
    *,
    path: str | None,
    weights: Literal["trained", "ema"],
    adapter: Literal["merged", "merged_unquantized", "separate"],
    format: Literal["auto", "transformers", "timm", "safetensors", "onnx"],
    dtype: Literal["float32", "bfloat16", "float16"] | None,
    push_to: str | None,
    private: bool,
) -> int:
    """Write a folder with everything that the model needs elsewhere, and push it if `push_to` names a repository.

    Args:
        run: A run with a checkpoint.
        path: Folder to write; None is `export` in the run folder.
        weights: `trained`, or `ema` for their moving average.
        adapter: How to export an adapter: `merged` into the weights that it was trained beside, dequantized if those
            were in NF4; `merged_unquantized` into the weights from before quantization; or `separate` in peft's format.
        format: `transformers` or `timm`, which know the architecture; `safetensors`, which `lr.load` loads; or `onnx`.
            `auto` is one of the first two where it can be, else `safetensors`.
        dtype: Dtype of the parameters; None is that of the published weights that the run started from, else that in
            which the run keeps them, as of an adapter alone. An ONNX graph is in float32.
        push_to: Repository of the Hugging Face hub, `<user or organization>/<name>`; None: nothing is pushed.
        private: Whether a repository that is created there is private.

    Returns:
        The exit code: 0, or 74 if the hub did not take the export, which is whole on the disk.

    Raises:
        ConfigError: There is no checkpoint, or no average in it, the model cannot be in this format or dtype,
            transformers cannot load the tokenizer as it was, or the folder cannot be written to or holds files of
            something else.
    """
    target = path if path is not None else str(run.folder / EXPORT_FOLDER)
    folder = _claim(run, target)
    if push_to is not None:
        check_token(push_to)
    task, checkpoint = load_task(run, weights)
    model: Any = task if run.has_own_training else task.model
    drop_value(model)  # which the training of a policy alone reads
    is_separate = has_adapter(model) and adapter == "separate"
    if has_score(model):
        layout = PEFT_REWARD_MODEL if is_separate else _choose_layout_of_rewards(format)
    else:
        layout = "peft" if is_separate else _choose_layout(model, format)
    what = f"the adapter of {checkpoint}, for peft," if is_separate else str(checkpoint)
    _convert(run, task, model, layout, adapter=adapter, dtype=dtype)
    needs_no_data = run.has_own_training or layout in ("transformers", REWARD_MODEL, *_OF_PEFT)
    example = None if needs_no_data else find_example(run, model)
    verified, facts = _write(run, model, folder, layout, example)
    record: dict[str, Any] = _describe(folder, run) | {"checkpoint": checkpoint.name, "format": layout} | facts
    record |= _describe_content(run, model, folder, layout, example)
    earlier = _read_record(folder)
    card = make_card(
        run, record, _list_parameters(model, layout), checkpoint=checkpoint, push_to=push_to,
        is_of_chain=bool(getattr(task, "started_from", ())),
    )  # fmt: skip
    record["card"] = _write_card(folder, card, earlier.get("card"))
    write_atomically(folder / EXPORT_RECORD, format_record(record))
    LOGGER.info(f"Exported {what} to {folder}; {verified}")
    if push_to is None:
        return ExitCode.FINISHED
    files = [name for name in _list_files(folder, run) if (folder / name).is_file()]
    failure = push(folder, push_to, private=private, files=files, owned=EXPORT_FILES)
    if failure is None:
        return ExitCode.FINISHED
    LOGGER.error(f"{failure}. The export is whole in {folder}")
    return ExitCode.UNSAVED


def _claim(run: Run, target: str) -> Path:
    """Return the folder of the export, to which its files may be written.

    Raises:
        ConfigError: It holds something else than an export of this run.
    """
    setting = f"mode.path={target}"
    folder = claim_output(target, "mode.path")
    source = _find_source(run)
    if source is not None and folder.resolve() == source.resolve():
        reason = "it holds the published model that the run started from, which the export would replace"
        raise ConfigError(setting, reason, "mode.path=<another folder>")
    if folder.resolve().is_relative_to((run.folder / CHECKPOINTS).resolve()):
        reason = "the checkpoints of the run are there, and their folders hold nothing else"
        raise ConfigError(setting, reason, "mode.path=<another folder>")
    if (foreign := _find_foreign(folder, run, source)) is not None:
        reason = f"it holds {foreign.name}, which is not of an export of this run: it would be replaced"
        raise ConfigError(setting, reason, "mode.path=<another folder>")
    return folder


def _find_source(run: Run) -> Path | None:
    """Return the folder of the published model that the run started from; None if there is none any more."""
    return None if run.published is None else published_folder(run.published)


def _choose_layout(model: nn.Module, format: str) -> str:
    """Return the format of a whole model.

    Raises:
        ConfigError: timm was asked for, and has no such model.
    """
    reason = why_no_folder(model)
    if format == "timm" and reason is not None:
        raise ConfigError("mode.format=timm", reason, "mode.format=auto")
    if format != "auto":
        return format
    if isinstance(model, TimmModel):
        if reason is None:
            return "timm"
        LOGGER.info(f"Exported as safetensors, not for timm: {reason}")
        return "safetensors"
    if (reason := why_no_format(model)) is None:
        return "transformers"
    if getattr(model, "input_kind", None) == "tokens":
        LOGGER.info(f"Exported as safetensors, not for transformers: {reason}")
    return "safetensors"


def _choose_layout_of_rewards(format: str) -> str:
    """Return the format of a whole reward model: the only one in which another program reads its score.

    Raises:
        ConfigError: Another one was asked for.
    """
    if format not in ("auto", "transformers"):
        reason = "a reward model is exported for AutoModelForSequenceClassification of transformers"
        raise ConfigError(f"mode.format={format}", reason, "mode.format=transformers")
    return REWARD_MODEL


def _convert(run: Run, task: TrainingTask, model: nn.Module, layout: str, *, adapter: str, dtype: str | None) -> None:
    """Merge an adapter, in float32, and give the parameters the dtype of the export, rounding them once.

    Raises:
        ConfigError: A value is beyond the dtype.
    """
    setting, wanted = f"mode.dtype={'null' if dtype is None else dtype}", None if dtype is None else DTYPES[dtype]
    if layout in _OF_PEFT:
        if any(list_nf4(model)):
            LOGGER.info(
                "The adapter was trained on NF4-quantized weights, and matches training only on top of the NF4 base"
            )
        if wanted is not None:
            convert_parameters(model, wanted, setting=setting, only=list_saved(model).__contains__)
        return
    if layout == "onnx":
        wanted = torch.float32
    elif wanted is None and run.base is not None:
        wanted = find_dtype(run.base)
    if has_adapter(model):
        _restore_base(task, exactly=adapter == "merged")
        wanted = wanted or _find_own_dtype(model)
        convert_parameters(model, torch.float32, setting=setting)
        merge_adapter(model)
    if wanted is not None:
        convert_parameters(model, wanted, setting=setting)


def _find_own_dtype(model: nn.Module) -> torch.dtype:
    return next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())


def _write(run: Run, model: Any, folder: Path, layout: str, example: Tensor | None) -> tuple[str, dict[str, Any]]:
    """Write the files of a format, verify them, and return what that showed, and what the record says of it.

    Raises:
        ConfigError: The model cannot be in this format.
    """
    tokenizer_folder = run.tokenizer_folder if run.tokenizer_folder.is_dir() else None
    status.say(f"writing {folder}, and reading it back")
    if layout == "transformers":
        pixels = find_pixels(run)
        is_of_both = getattr(model, "reads_images", False) or getattr(model, "input_kind", None) == "images_and_text"
        if is_of_both and pixels is None:
            LOGGER.info("No processor is exported: the data of the run does not say what is made of an image")
        export_pretrained(model, folder, tokenizer_folder=tokenizer_folder, published=run.published, pixels=pixels)
        return _READ_BACK, {}
    if layout == REWARD_MODEL:
        export_reward_model(model, folder, tokenizer_folder=tokenizer_folder, published=run.published)
        return _READ_BACK, {}
    facts: dict[str, Any] = {}
    tokenizer = None if tokenizer_folder is None else load_exported_tokenizer(tokenizer_folder, run.published)
    verified = _READ_BACK
    with filling(folder, owned=EXPORT_FILES) as unfinished:
        if layout == PEFT_REWARD_MODEL:
            check_classifier(model)
        if layout in _OF_PEFT:
            save_adapter(model, unfinished)
        elif layout == "safetensors":
            save_weights(model, unfinished)
            node = describe_model(run.model_node)
            check_loads(model, node, unfinished, is_own_training=run.has_own_training)
        elif layout == "timm":
            export_folder(
                model, unfinished, class_names=run.data.class_names, preprocessing=describe_preprocessing(run, model)
            )
        else:
            difference = write_onnx(
                _make_eager(run, model), make_example(run, model) if example is None else example, unfinished
            )
            verified = f"onnxruntime computes the same outputs, to {difference:.0e} of the largest"
        if layout in _OF_PEFT or tokenizer is not None:
            write_text_side(unfinished, tokenizer=tokenizer, published=run.published)
        if layout == PEFT_REWARD_MODEL:
            facts["pad_token_id"] = choose_padding(model.inner.config, unfinished)
    return verified, facts


@torch.no_grad()
def _make_eager(run: Run, model: nn.Module) -> nn.Module:
    """Return a copy of a model on the CPU that is not compiled, in float32."""
    copy, source = construct(describe_model(run.model_node) | _name_architecture(run)), list_weights(model)
    for name, tensor in list_weights(copy).items():
        tensor.copy_(source[name])
    return copy


def _name_architecture(run: Run) -> dict[str, Any]:
    """Return the setting of a model that only its name describes, which no record holds."""
    return {"name": run.model_node["name"]} if run.model_node.get("name") else {}


def _describe_content(run: Run, model: Any, folder: Path, layout: str, example: Tensor | None) -> dict[str, Any]:
    """Return what export.json says about the model."""
    dtype = _list_parameters(model, layout)[0].dtype
    described: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
    described["has_tokenizer"] = (folder / TOKENIZER_FILE).is_file()
    if layout in _OF_PEFT:
        return described | {"architecture": f"adapter, {model.adapter_config.peft_type.value}"}
    described["architecture"] = getattr(model, "title", type(model).__name__)
    if run.has_own_training:
        return described | {"module": describe_model(run.model_node)}
    described["model"] = describe_model(run.model_node)
    described["inputs"] = describe_inputs(run, model, example)
    return described | {"outputs": describe_outputs(run, model, example)}


def _list_parameters(model: nn.Module, layout: str) -> list[nn.Parameter]:
    """Return the parameters that are exported."""
    saved = list_saved(model) if layout in _OF_PEFT else None
    return [value for name, value in model.named_parameters() if saved is None or name in saved]


def _write_card(folder: Path, card: str, earlier: object) -> object:
    """Write the model card unless somebody else's is there; return a hash of what was written, or the earlier one.

    Args:
        folder: The export.
        card: Text of the card.
        earlier: Hash of the card that an earlier export wrote.
    """
    file = folder / CARD_FILE
    if file.is_file() and _hash(file.read_bytes()) != earlier:
        LOGGER.info(f"{file} is not as an export has written it, and stays as it is")
        return earlier
    write_atomically(file, card)
    return _hash(card.encode())


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read_record(folder: Path) -> Mapping[str, Any]:
    """Return the record of an earlier export; empty if there is none, or another program's file."""
    with suppress(ConfigError):
        return read_json(folder / EXPORT_RECORD, fix="")
    return {}


def _list_files(folder: Path, run: Run) -> list[str]:
    """Return the names of the files in an export that are of it, and not somebody else's."""
    further = [path.name for path in list_further_files(_find_source(run))]
    own = [path.name for pattern in EXPORT_FILES for path in sorted(folder.glob(pattern))]
    return sorted({*own, *further, CARD_FILE, EXPORT_RECORD})


def _find_foreign(folder: Path, run: Run, source: Path | None) -> Path | None:
    """Return a file that an export would replace and that no earlier export of this run wrote; None if there is none.

    Args:
        folder: Folder of the export.
        run: The run.
        source: Published model whose further files go with the export; None if there is none.
    """
    if _read_record(folder).items() >= _describe(folder, run).items():
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
        "run": _hash(name),
        "config": None if config is None else _hash(config.read_bytes()),
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
