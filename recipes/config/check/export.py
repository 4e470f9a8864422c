"""Check what an export is to be: format, dtype, packages and the repository that it is pushed to."""

import re
from collections.abc import Iterator
from importlib.util import find_spec

from recipes.config.resolved import ResolvedRun
from recipes.config.signature import find_signature
from recipes.errors import ConfigError, type_extra

_MODE = "export"
_PACKAGES_OF_ONNX = ("onnx", "onnxscript", "onnxruntime")
# what the hub takes: no leading or trailing - or ., none of them twice, at most 96 characters
_REPOSITORY = re.compile(r"(?!.*(--|\.\.))\w([\w.-]*\w)?/\w([\w.-]*\w)?", re.ASCII)
_MAX_NAME = 96
_OF_TIMM = "recipes.model.timm_model.TimmModel"


def check_export(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check the settings of `mode=export` against each other, the model and what is installed."""
    mode = run.config["mode"]
    if run.mode.name != _MODE:
        return
    layout, dtype, adapter, push_to = mode["format"], mode["dtype"], mode["adapter"], mode["push_to"]
    shown = f"mode.format={layout}"
    if adapter == "separate" and layout != "auto":
        reason = "an adapter alone has the layout of peft"
        yield ConfigError(f"{shown} mode.adapter=separate", reason, f"{shown} mode.adapter=merged")
    if run.task.has_own_training and layout not in ("auto", "safetensors"):
        reason = "what a LightningModule takes and returns is known to itself alone"
        yield ConfigError(f"{shown} task=lightning", reason, "mode.format=safetensors")
        return
    model = str(run.config["model"]["_target_"])
    declared = find_signature(model).constants
    is_of_transformers = declared.get("built_by_name", False)
    kind = declared.get("input_kind")
    if layout == "transformers" and kind in ("images", "tensors", "images_and_text") and not is_of_transformers:
        reason = f"transformers has no layout for {model.rpartition('.')[2]}"
        fix = "mode.format=timm" if model == _OF_TIMM else "mode.format=safetensors, which lightning_recipes.load loads"
        yield ConfigError(shown, reason, fix)
    if layout == "timm" and model != _OF_TIMM:
        yield ConfigError(shown, f"timm has no {model.rpartition('.')[2]}", "mode.format=auto")
    if layout == "safetensors" and is_of_transformers:
        yield ConfigError(shown, "a model of transformers has its layout, in safetensors", "mode.format=transformers")
    if layout == "onnx" and kind == "images_and_text":
        yield ConfigError(shown, "a graph has one input, and this model takes images and captions", "mode.format=auto")
    elif layout == "onnx":
        if dtype not in (None, "float32"):
            reason = "a graph is compared with the model in float32, and onnxruntime converts it to other dtypes"
            yield ConfigError(f"{shown} mode.dtype={dtype}", reason, f"{shown} mode.dtype=float32")
        if missing := [name for name in _PACKAGES_OF_ONNX if find_spec(name) is None]:
            verb = "is" if len(missing) == 1 else "are"
            reason = f"it needs {' and '.join(missing)}, which {verb} not installed"
            yield ConfigError(shown, reason, type_extra("onnx"))
    if push_to is None:
        yield from _find_unread(run)
        return
    shown = f"mode.push_to={push_to}"
    if not _REPOSITORY.fullmatch(push_to) or max(map(len, push_to.split("/"))) > _MAX_NAME:
        reason = "a repository of the hub has the name of its user or organization, a slash, and its own"
        name = re.sub(r"[^\w.-]+", "-", push_to.rpartition("/")[2], flags=re.ASCII).strip("-.") or "<name>"
        yield ConfigError(shown, reason, f"mode.push_to=<user or organization>/{name}")
    elif find_spec("huggingface_hub") is None:
        yield ConfigError(shown, "it needs huggingface_hub, which is not installed", type_extra("huggingface"))


def _find_unread(run: ResolvedRun) -> Iterator[ConfigError]:
    for override in run.typed:
        if override.lstrip("+").startswith("mode.private="):
            fix = f"{override} mode.push_to=<user or organization>/<name>, or the same command without it"
            yield ConfigError(override, "nothing is pushed, so it has no effect", fix)
