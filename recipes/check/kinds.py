"""The kind of samples that task, model and data agree on, read from their classes' source."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from recipes.mistake import Mistake
from recipes.signature import TargetNotFoundError, read_signature


def check_kinds(
    config: Mapping[str, Any], choices: Mapping[str, str], overrides: Sequence[str]
) -> Iterator[Mistake]:
    """Tokens or images: what the model takes, what the data gives, what the task learns."""
    if not all(isinstance(config.get(group), dict) for group in ("task", "model", "data")):
        return
    takes = {
        group: _kind(config[group]["_target_"], attribute)
        for group, attribute in (
            ("task", "input_kind"),
            ("model", "input_kind"),
            ("data", "sample_kind"),
        )
    }
    if None in takes.values():
        return  # a target that cannot be read: the nodes' own check says so
    named = {group: f"{group}={_option(config, choices, group)}" for group in takes}
    if takes["model"] != takes["data"]:
        typed = {override.partition("=")[0] for override in overrides}
        if "data" in typed and "model" not in typed:  # then the data is what is meant
            remedy = "model=gpt2_nano" if takes["data"] == "tokens" else "model=resnet18"
        else:
            remedy = "data=stdlib_text" if takes["model"] == "tokens" else "data=digits"
        yield Mistake(
            f"{named['model']} {named['data']}",
            f"the model takes {takes['model']}, the data gives {takes['data']}",
            remedy,
        )
    if takes["model"] != takes["task"]:
        remedy = "task=language_modeling" if takes["model"] == "tokens" else "task=classification"
        yield Mistake(
            f"{named['model']} {named['task']}",
            f"the model takes {takes['model']}, the task {takes['task']}",
            remedy,
        )


def _kind(target: str, attribute: str) -> object:
    try:
        constants = read_signature(target).constants
    except TargetNotFoundError:
        return None
    return constants[attribute] if attribute in constants else None


def _option(config: Mapping[str, Any], choices: Mapping[str, str], group: str) -> str:
    if group in choices:
        return choices[group]
    return str(config[group]["_target_"]).split(".")[2]
