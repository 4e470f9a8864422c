"""What an export says of itself in export.json, and how its model is constructed from that.

Beside the run and the checkpoint, that is the config node of the model, what it takes and what it returns. A folder may
come from anywhere: it may choose only constructors that the options of conf/, of a project or of the command line name
for a model, as the config of a run folder, and its weights are safetensors.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from recipes.build import Run
from recipes.config.check.origin import check_origin
from recipes.config.instantiate import PARTIAL, TARGET, make
from recipes.config.signature import find_signature
from recipes.config.traits import WEIGHT_KEYS
from recipes.errors import ConfigError, ConfigErrors
from recipes.foreign_file import reading
from recipes.model.score import has_score
from recipes.model.weights import any_module, await_checkpoint, load_published
from recipes.run_folder import EXPORT_RECORD, read_json
from recipes.runtime.console import LOGGER
from recipes.tokenizer import TOKENIZER_FILE, Tokenizer, read_folder
from recipes.transform.images import ImageTransform
from recipes.transform.published import Pixels

NUM_EXAMPLES = 3  # samples in the example, one more than a traced batch has
_NUM_TOKENS = 8  # in a row of the example
REWARD_MODEL = "sequence_classification"  # format of a reward model
PEFT_REWARD_MODEL = "peft_sequence_classification"  # of the adapter of one, with its score
_ANOTHER = "load(<a folder that mode=export has written>)"
# formats that hold no module -> what loads them
_LOADED_BY = {
    "onnx": 'onnxruntime.InferenceSession("model.onnx"), or mode.format=safetensors for an export that it loads',
    "peft": "peft.PeftModel.from_pretrained, or mode.adapter=merged for an export that it loads",
    PEFT_REWARD_MODEL: "peft.PeftModel.from_pretrained, or load(<the run folder>)",
    REWARD_MODEL: "transformers.AutoModelForSequenceClassification.from_pretrained, or load(<the run folder>)",
}


def describe_model(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the node of a model without where it came from: the weights are here, and the paths of this machine."""
    places = (*WEIGHT_KEYS, *(("name", "vision", "language") if _is_built_by_name(node) else ()))
    return {key: None if key in places else value for key, value in node.items()}


def _is_built_by_name(node: Mapping[str, Any]) -> bool:
    return bool(find_signature(node[TARGET]).constants.get("built_by_name"))


def construct(node: Mapping[str, Any], *, is_own_training: bool = False) -> nn.Module:
    """Return the model of a node in eval mode, its parameters still to be filled.

    Args:
        node: Node of the model.
        is_own_training: Whether it is a LightningModule of one's own, whose constructor may compute what it likes.
    """
    if is_own_training:
        module: Any = make({key: value for key, value in node.items() if key != PARTIAL})
        module.configure_model()
        own: nn.Module = module.eval()
        return own
    with torch.device("meta"):
        model: nn.Module = make(node)
    model.to_empty(device="cpu")
    await_checkpoint(model, seed=0)
    return model.eval()


def make_example(run: Run, model: Any) -> Tensor:
    """Return inputs of a few samples, [3, …]: tokens that are made up, or the first ones of the validation split.

    Raises:
        ConfigError: The data is not there, or its inputs are not one tensor.
    """
    if getattr(model, "input_kind", None) == "tokens":
        num_tokens: int = min(_NUM_TOKENS, model.max_seq_len)
        vocab_size: int = model.vocab_size
        return torch.arange(NUM_EXAMPLES * num_tokens).reshape(NUM_EXAMPLES, num_tokens) % vocab_size
    source = run.data.source
    collate = getattr(source, "collate", None) or default_collate
    try:
        run.data.prepare_split("val", alone=True)
        dataset = source.val()
        inputs = collate([dataset[index % len(dataset)] for index in range(NUM_EXAMPLES)])["inputs"]
    except OSError as error:  # of a dataset of one's own
        fix = "the validation data, where it was, or mode.format=safetensors, which needs none"
        raise ConfigError("data.val", str(error), fix) from error
    if not isinstance(inputs, Tensor):
        reason = f"a batch of the data has a {type(inputs).__name__} as its inputs, not one tensor"
        raise ConfigError("mode=export", reason, "data.collate with a function that returns one tensor as inputs")
    return inputs


def describe_inputs(run: Run, model: Any, example: Tensor | None) -> dict[str, Any]:
    """Return what the model takes: kind, shape and dtype of a sample, and how the data has transformed it."""
    kind = getattr(model, "input_kind", None)
    if kind == "tokens":
        described: dict[str, Any] = {
            "kind": kind,
            "shape": ["tokens"],
            "dtype": "int64",
            "max_seq_len": model.max_seq_len,
        }
        if (reader := getattr(run.data.source, "image_reader", None)) is None:
            return described
        images = {"shape": [*reader.shape], "tokens": reader.tokens.length, "token": reader.tokens.id}
        return described | {"images": images | {"transform": reader.transform.describe_eval()}}
    of_captions = {} if kind != "images_and_text" else {"max_seq_len": model.max_seq_len}
    if example is None:
        return {"kind": kind} | of_captions
    dtype = str(example.dtype).removeprefix("torch.")
    described = {"kind": kind} | of_captions | {"shape": [*example.shape[1:]], "dtype": dtype}
    transform = getattr(run.data.source, "transform", None)
    if isinstance(transform, ImageTransform):
        return described | {"transform": transform.describe_eval()}
    return described if transform is None else described | {"transform": str(transform)}


def describe_preprocessing(run: Run, model: Any) -> dict[str, Any]:
    """Return how a validation prepares images in the words of timm; empty where the data does it in another way."""
    transform = getattr(run.data.source, "transform", None)
    if not isinstance(transform, ImageTransform):
        return {}
    pixels = transform.pixels
    return {
        "input_size": (model.in_channels, pixels.eval_size, pixels.eval_size),
        "interpolation": pixels.interpolation,
        "mean": tuple(pixels.mean),
        "std": tuple(pixels.std),
        "crop_pct": pixels.eval_crop,
        "crop_mode": pixels.crop_mode,
    }


def find_pixels(run: Run) -> Pixels | None:
    """Return what an image among tokens, or with a caption, was made into; None where the data reads none."""
    source = run.data.source
    transform = getattr(getattr(source, "image_reader", source), "transform", None)
    return transform.pixels if isinstance(transform, ImageTransform) else None


def describe_outputs(run: Run, model: Any, example: Tensor | None) -> dict[str, Any]:
    """Return what the model returns: what the targets were, how many outputs there are, and the names of classes."""
    if getattr(model, "input_kind", None) == "tokens":
        if has_score(model):
            return {"kind": "reward", "number": 1}
        return {"kind": "logits of the next token", "number": model.vocab_size}
    if getattr(model, "input_kind", None) == "images_and_text":
        return {"kind": "features", "number": model.projection_size}
    number = getattr(model, "num_classes", None)
    described = {"kind": run.target_kind} | ({} if number is None else {"number": number})
    names = run.data.class_names
    return described if names is None else described | {"classes": names}


def find_example(run: Run, model: Any) -> Tensor | None:
    """Return the example, None with a line in the log if the data is not there."""
    try:
        return make_example(run, model)
    except ConfigError as mistake:
        LOGGER.info(f"{EXPORT_RECORD} does not say which shape the inputs have: {mistake.setting}: {mistake.reason}")
        return None


def load_export(folder: Path, typed: Sequence[str], *, shown: str) -> tuple[nn.Module, Tokenizer | None]:
    """Return the model of an export in eval mode, on the CPU, and its tokenizer if it has one.

    A model of ours has its own dtypes, float32, and the values of the file.

    Args:
        folder: Folder with an export.json.
        typed: Overrides: a search path, or the constructor of the model, which its folder alone may not choose.
        shown: The call, for errors.

    Raises:
        ConfigErrors: The folder names a constructor that it may not choose.
        ConfigError: It is damaged, of another program, or holds something else than a module.
    """
    file = folder / EXPORT_RECORD
    record = read_json(file, fix=_ANOTHER)
    if (loader := _LOADED_BY.get(str(record.get("format")))) is not None:
        raise ConfigError(shown, f"it holds no module, but what {record['format']} is for", loader)
    is_own_training = "module" in record
    node = record.get("module" if is_own_training else "model")
    if not isinstance(node, dict) or not isinstance(node.get(TARGET), str):
        raise ConfigError(shown, f"{file} does not say how its model is constructed", _ANOTHER)
    place = {"task": {"module": node}} if is_own_training else {"model": node}
    if untrusted := [*check_origin(place, typed, file)]:
        raise ConfigErrors(untrusted, "The export cannot be loaded.")
    if _is_built_by_name(node):
        node = node | {"name": str(folder), "pretrained": str(folder)}
    with reading(file, shown, _ANOTHER):
        model = construct(node, is_own_training=is_own_training)
    if record.get("format") == "safetensors":
        any_module.load_weights(model, folder, setting=shown, fix=_ANOTHER)
    else:
        load_published(model, str(folder))
    return model.eval(), read_folder(folder) if (folder / TOKENIZER_FILE).is_file() else None


def check_loads(model: nn.Module, node: Mapping[str, Any], folder: Path, *, is_own_training: bool) -> None:
    """Load a folder of safetensors into a new model and compare it with the one that was written, bit by bit.

    Raises:
        OSError: A tensor differs.
    """
    again = construct(node, is_own_training=is_own_training)
    any_module.load_weights(again, folder, setting="mode=export", fix="the same command")
    written = any_module.list_weights(model)
    for name, tensor in any_module.list_weights(again).items():
        if not torch.equal(tensor.to(written[name].dtype), written[name].detach().cpu()):
            raise OSError(f"{folder / any_module.WEIGHTS}: {name} reads back differently")


def format_record(record: Mapping[str, Any]) -> str:
    """Return the text of export.json."""
    return json.dumps(record, indent=2) + "\n"
