"""Check that a resumed run has the same model and tokenizer as its weights were trained with."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recipes.config.check.types import to_setting
from recipes.errors import ConfigError
from recipes.run_folder import CONFIG_FILE, find_run_folder, has_checkpoint, read_config

# model settings that change the function its weights compute, several of them without changing any shape
OF_WEIGHTS = (
    "num_heads",
    "num_kv_heads",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "vocab_size",
    "tie_embeddings",
    "num_experts_per_token",
    "router_scores",
    "renormalize_weights",
    "weights_scale",
    "num_expert_groups",
    "num_groups_per_token",
    "num_classes",
    "in_channels",
    "small_images",
)


def check_resumed(config: Mapping[str, Any], run_folder: Path) -> Iterator[ConfigError]:
    """Reject a model or tokenizer that differs from the one the weights were trained with.

    Args:
        config: Plain values, every interpolation resolved.
        run_folder: Folder for the files of the run, which `resume=auto` continues.
    """
    trained = _read_trained(config["resume"], run_folder)
    if trained is None:
        return
    before, now = trained["model"], config["model"]
    if before.get("_target_") != now.get("_target_"):
        name = str(before.get("_target_")).rpartition(".")[2]
        yield ConfigError(
            f"resume={config['resume']} model._target_={now.get('_target_')}",
            f"its weights are those of {name}",
            "nothing for model=, or resume=null to train another model",
        )
        return
    for key in OF_WEIGHTS:
        if before.get(key) != now.get(key):
            yield ConfigError(
                f"resume={config['resume']} model.{key}={to_setting(now.get(key))}",
                f"its weights were trained with model.{key}={to_setting(before.get(key))}",
                f"nothing for model.{key}, or resume=null to train another model",
            )
    # tokens prepared elsewhere (data=token_file) come without a tokenizer and cannot be compared
    known, chosen = trained["tokenizer"], config["tokenizer"]
    if known and chosen and known != chosen:
        yield ConfigError(
            f"resume={config['resume']} tokenizer._target_={chosen.get('_target_')}",
            f"its weights were trained with the token ids of {_describe(known)}, not of {_describe(chosen)}",
            "nothing for tokenizer=, or resume=null to train with another one",
        )


def _read_trained(resume: object, run_folder: Path) -> dict[str, Any] | None:
    """Return the model and the tokenizer of the run whose weights are loaded; None if there is none to compare with."""
    if resume == "auto":
        run = run_folder if has_checkpoint(run_folder) else None
    else:
        run = None if resume is None else find_run_folder(Path(str(resume)))
    if run is None or not (run / CONFIG_FILE).is_file():
        return None
    try:
        frozen = read_config(run)
    except ConfigError:
        return None  # reported where the run is composed from it; `auto` composes from the command line alone
    if not isinstance(frozen.get("model"), dict):
        return None
    return {"model": frozen["model"], "tokenizer": frozen.get("tokenizer")}


def _describe(tokenizer: Mapping[str, Any]) -> str:
    settings = [f"{key}={to_setting(value)}" for key, value in tokenizer.items() if key != "_target_"]
    name = str(tokenizer.get("_target_")).rpartition(".")[2]
    return f"{name}({', '.join(settings)})" if settings else name
