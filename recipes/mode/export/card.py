"""The model card of an export, README.md: what it is, what it was trained on, and how to load it."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from recipes.build import Run
from recipes.data.datamodule import StreamDataModule
from recipes.errors import ConfigError
from recipes.model.weights.files import published_folder
from recipes.run_folder import METRICS_FILE, read_rows
from recipes.runtime.console import LOGGER

CARD_FILE = "README.md"
_LIBRARIES = {
    "transformers": "transformers",
    "sequence_classification": "transformers",
    "peft": "peft",
    "peft_sequence_classification": "peft",
    "timm": "timm",
    "onnx": "onnx",
}
_FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_STEP = re.compile(r"step_(\d+)")
_DOWNLOAD = """from huggingface_hub import snapshot_download

folder = snapshot_download("{place}")"""
_LOADED = {
    "transformers": """from transformers import AutoModelForCausalLM{tokenizer_class}

model = AutoModelForCausalLM.from_pretrained("{place}")
{tokenizer}""",
    "sequence_classification": """from transformers import AutoModelForSequenceClassification{tokenizer_class}

model = AutoModelForSequenceClassification.from_pretrained("{place}")  # reward: model(**inputs).logits[:, 0]
{tokenizer}""",
    "peft": """from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("{place}")  # with the weights of {base}""",
    "peft_sequence_classification": """from peft import PeftModel
from transformers import AutoModelForSequenceClassification{tokenizer_class}

base = AutoModelForSequenceClassification.from_pretrained({base!r}, num_labels=1, pad_token_id={pad_token_id})
model = PeftModel.from_pretrained(base, "{place}")  # reward: model(**inputs).logits[:, 0]
{tokenizer}""",
    "timm": """import timm
{download}
model = timm.create_model(f"local-dir:{{folder}}", pretrained=True).eval()""",
    "safetensors": """import lightning_recipes as lr
{download}
model = lr.load(folder)  # {target}, in eval mode""",
    "onnx": """import onnxruntime
{download}
session = onnxruntime.InferenceSession(f"{{folder}}/model.onnx")
[outputs] = session.run(None, {{"inputs": inputs}})  # a numpy array; any number of samples""",
}


def make_card(
    run: Run,
    record: Mapping[str, Any],
    parameters: Sequence[Tensor],
    *,
    checkpoint: Path,
    push_to: str | None,
    is_of_chain: bool,
) -> str:
    """Return the text of the card.

    Args:
        run: The run.
        record: What export.json says.
        parameters: What is exported.
        checkpoint: Checkpoint that was exported.
        push_to: Repository that it will be pushed to.
        is_of_chain: Whether the run started from the weights of another one.
    """
    layout, base = record["format"], run.base
    base_of_hub = base if base is not None and not Path(base).expanduser().exists() else None
    licence, is_beside = find_licence(base)
    front: dict[str, Any] = {"library_name": _LIBRARIES.get(layout, "lightning-recipes"), "tags": ["lightning-recipes"]}
    if layout in ("transformers", "peft"):
        front["pipeline_tag"] = "text-generation"
    if layout == "timm":
        front["pipeline_tag"] = "image-classification"
    if layout in ("sequence_classification", "peft_sequence_classification"):
        front["pipeline_tag"] = "text-classification"
    front |= {} if licence is None else {"license": licence}
    front |= {} if base_of_hub is None else {"base_model": base_of_hub}
    step = _read_step(checkpoint)
    first = "a published model" if base else "another run" if is_of_chain else "random weights"
    facts = {
        "model": record["architecture"],
        "parameters": f"{sum(parameter.numel() for parameter in parameters):,}",
        "dtype": record["dtype"],
        "trained from": base_of_hub or first,
        "data": ", ".join(run.data_names),
        "optimizer steps": checkpoint.name if step is None else f"{step:,}",
    }
    if not run.has_own_training or isinstance(run.data, StreamDataModule):  # loaders of one's own decide it themselves
        facts["samples per step"] = f"{run.accumulation.global_batch_size:,}"
    facts |= _list_measures(checkpoint, step) | _list_shapes(record)
    lines = [f"# {run.name}", "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())]
    lines += ["", "```python", _tell_how_to_load(record, push_to, base), "```", ""]
    if base is not None and (licence or is_beside):
        beside = ", beside it here" if is_beside else ""
        lines += [
            f"The model that it was trained from has a licence of its own ({licence or 'see LICENSE'}{beside}).",
            "",
        ]
    lines += ["Written by `mode=export` of lightning-recipes; `export.json` has its settings.", ""]
    return f"---\n{yaml.safe_dump(front, sort_keys=True)}---\n\n" + "\n".join(lines)


def find_licence(base: str | None) -> tuple[str | None, bool]:
    """Return the licence that the card of a published model names, and whether its folder has the text of one."""
    folder = None if base is None else published_folder(base)
    if folder is None:
        return None, False
    is_beside = any(folder.glob("LICENSE*"))
    card = folder / CARD_FILE
    found = _FRONT_MATTER.match(card.read_text("utf-8", errors="replace")) if card.is_file() else None
    try:
        licence = yaml.safe_load(found[1]).get("license") if found else None
    except (yaml.YAMLError, AttributeError) as error:  # no mapping: somebody else's file
        LOGGER.info(f"{card} does not say which licence the model has: {type(error).__name__}")
        licence = None
    return licence if isinstance(licence, str) else None, is_beside


def _read_step(checkpoint: Path) -> int | None:
    found = _STEP.match(checkpoint.name)
    return int(found[1]) if found else None


def _list_measures(checkpoint: Path, step: int | None) -> dict[str, str]:
    """Return what was validated at the step of a checkpoint."""
    try:
        rows = read_rows(checkpoint.resolve().parents[1] / METRICS_FILE)
    except ConfigError as mistake:
        LOGGER.info(f"The card has no metrics: {mistake.setting}: {mistake.reason}")
        return {}
    row = next((row for row in rows if row["step"] == step), {})
    return {name: f"{value:.6g}" for name, value in row.items() if name.startswith("val/")}


def _list_shapes(record: Mapping[str, Any]) -> dict[str, str]:
    inputs, outputs = record.get("inputs") or {}, record.get("outputs") or {}
    shape = f" [{', '.join(map(str, inputs['shape']))}], {inputs['dtype']}" if "shape" in inputs else ""
    shown = {"inputs": f"{inputs['kind']}{shape}"} if inputs.get("kind") else {}
    shown |= {"transform": " ".join(inputs["transform"].split())} if "transform" in inputs else {}
    shown |= {"outputs": " ".join(str(outputs[key]) for key in ("number", "kind") if key in outputs)} if outputs else {}
    return shown | ({"classes": ", ".join(map(str, outputs["classes"]))} if "classes" in outputs else {})


def _tell_how_to_load(record: Mapping[str, Any], push_to: str | None, base: str | None) -> str:
    has_tokenizer = record["has_tokenizer"]
    place = push_to or "<this folder>"
    return (
        _LOADED[record["format"]]
        .format(
            place=place,
            download=_DOWNLOAD.format(place=place) if push_to else '\nfolder = "<this folder>"',
            target=(record.get("model") or record.get("module") or {}).get("_target_"),
            pad_token_id=record.get("pad_token_id"),
            base=base if base is None or not Path(base).expanduser().exists() else "the published model",
            tokenizer_class=", AutoTokenizer" if has_tokenizer else "",
            tokenizer=f'tokenizer = AutoTokenizer.from_pretrained("{place}")' if has_tokenizer else "",
        )
        .rstrip()
    )
