"""Export a reward model for `AutoModelForSequenceClassification` of transformers, which reads the score where we do.

That class reads the last token of a row that is not `pad_token_id`. The score belongs to the token that ends an answer,
so a padding token that is also the end of a text would move it to the token before.
"""

import copy
import json
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recipes.adapter import is_adapter
from recipes.errors import ConfigError, type_extra
from recipes.files import filling, write_atomically
from recipes.model.score import SCORE_WEIGHT
from recipes.model.transformers_models import without_remarks
from recipes.model.weights.files import WEIGHT_FILES
from recipes.model.weights.hf_any import CHECKED_AFTERWARDS, without_progress_bars
from recipes.model.weights.huggingface import export_pretrained
from recipes.model.weights.text_side import EXPORT_FILES
from recipes.numerics.deepspeed_import import without_warning_of_deepspeed
from recipes.numerics.torchao_import import without_warnings_of_torchao
from recipes.tokenizer import GENERATION_FILE, SETTINGS_FILE, TOKENIZER_FILE, Tokenizer, read_folder

log = logging.getLogger("lightning_recipes")

_INSTEAD = "mode=predict or mode=evaluate, which need no export, or lr.load(<run folder>) and compute_rewards"


def export_reward_model(
    model: nn.Module, folder: Path, *, tokenizer_folder: Path | None, published: str | None
) -> None:
    """Write a folder that `AutoModelForSequenceClassification.from_pretrained` loads, and read it back.

    Args:
        model: Unsharded reward model.
        folder: Created if necessary; existing files with the same names are overwritten.
        tokenizer_folder: Source of the tokenizer; None: that of the published model, if there is one.
        published: Folder or hub name that the weights came from; None: that of the model, if it has one.

    Raises:
        ConfigError: transformers has no such class for the architecture, or is not installed.
        OSError: A file cannot be written, or differs when read back.
    """
    untyped: Any = model
    with filling(folder, owned=EXPORT_FILES) as target:
        export_pretrained(model, target, tokenizer_folder=tokenizer_folder, published=published)
        classifier = load_classifier(target, expected_missing={"score.weight"})
        with torch.no_grad():
            classifier.score.weight.copy_(untyped.score.weight)
        classifier.config.pad_token_id = choose_padding(classifier.config, target)
        for path in [path for pattern in (*WEIGHT_FILES, GENERATION_FILE) for path in target.glob(pattern)]:
            path.unlink()
        with without_progress_bars(), without_warning_of_deepspeed():
            classifier.save_pretrained(target)
        written, read = classifier.state_dict(), load_classifier(target, expected_missing=set()).state_dict()
        for name, tensor in written.items():
            if not _equal(tensor, read.get(name)):
                raise OSError(f"{folder}: {name} reads back differently")


def load_classifier(folder: Path, *, expected_missing: Collection[str]) -> Any:
    """Return the model of a folder with one score, on the CPU.

    Raises:
        ConfigError: transformers has no class for it that has the same weights and a score.
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        reason = "a reward model is exported through the package transformers, which is not installed"
        raise ConfigError("mode=export", reason, type_extra("huggingface")) from error
    classifier_class = _find_class(AutoConfig.from_pretrained(str(folder), trust_remote_code=False))
    options: dict[str, Any] = {"num_labels": 1, "dtype": "auto", "trust_remote_code": False, **CHECKED_AFTERWARDS}
    with without_progress_bars(), without_remarks(), without_warnings_of_torchao():
        model, report = classifier_class.from_pretrained(str(folder), **options)
    missing, mismatched = {*report["missing_keys"]}, [*report["mismatched_keys"]]
    if missing != {*expected_missing} or mismatched:
        raise _other_weights(model, missing ^ {*expected_missing} or mismatched)
    return model


def check_classifier(model: Any) -> None:
    """Check that transformers has a class with the layers of a reward model of its own and a score, for an adapter.

    Raises:
        ConfigError: It has none.
    """
    config = copy.deepcopy(model.inner.config)
    config.num_labels = 1
    with torch.device("meta"):
        classifier = _find_class(config).from_config(config)
    base = (name.replace(".base_layer.", ".") for name, _ in model.inner.named_parameters() if not is_adapter(name))
    own = {SCORE_WEIGHT, *base}
    missing = {name for name, _ in classifier.named_parameters()} - own
    if missing:
        raise _other_weights(classifier, missing)


def _find_class(config: Any) -> Any:
    """Return the class of transformers that makes a classifier of a config.

    Raises:
        ConfigError: It has none.
    """
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification

    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        reason = f"transformers has no AutoModelForSequenceClassification of the type {config.model_type}"
        raise ConfigError("mode=export", reason, _INSTEAD)
    return AutoModelForSequenceClassification


def _other_weights(model: Any, names: Collection[Any]) -> ConfigError:
    shown = ", ".join(sorted(map(str, names)))
    reason = f"{type(model).__name__} of transformers has other weights than a language model and a score: {shown}"
    return ConfigError("mode=export", reason, _INSTEAD)


def _equal(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.dtype == other.dtype and torch.equal(one, other)


def choose_padding(config: Any, folder: Path) -> int:
    """Return a token for padding that ends no text: that of the tokenizer, another special one, or any other."""
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    own: int | None = getattr(config, "pad_token_id", None)
    if own is not None and own not in ends:
        return own
    tokenizer: Tokenizer | None = read_folder(folder) if (folder / TOKENIZER_FILE).is_file() else None
    special = [] if tokenizer is None else sorted(id for id in tokenizer.special_ids if id not in ends)
    if tokenizer is not None and special and (folder / SETTINGS_FILE).is_file():
        settings = json.loads((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
        settings["pad_token"] = tokenizer.spell(special[0])
        write_atomically(folder / SETTINGS_FILE, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
        log.info("Padded with %s in the export: the token that ends a text would hide its end", settings["pad_token"])
        return special[0]
    padding = next(id for id in range(config.vocab_size) if id not in ends)
    log.warning(
        "The tokenizer has no special token for padding but the end of a text: pad the rows of a batch with the id %d",
        padding,
    )
    return padding
