"""Check what evaluates instead of a split: that the mode reads it, that the model is one of language, and its tasks."""

from collections.abc import Iterator, Mapping
from typing import Any

from recipes.errors import ConfigError

_EVALUATE = "recipes.mode.evaluate.evaluate"


def check_evaluator(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Check the evaluator of a composed config; the configs of older runs have none."""
    evaluator = config.get("evaluator")
    if not evaluator:
        return
    name = str(evaluator["_target_"]).split(".")[-2]
    if config["mode"]["_target_"] != _EVALUATE:
        reason = "no other mode than evaluate reads it"
        yield ConfigError(f"evaluator={name}", reason, f"mode=evaluate evaluator={name} resume=<run folder>")
        return
    if not config["task"]["_target_"].endswith("LanguageModeling"):
        reason = "its tasks are for language models, and this run has another task"
        yield ConfigError(f"evaluator={name}", reason, "evaluator=none")
    if evaluator.get("tasks") == []:
        yield ConfigError("evaluator.tasks=[]", "there is nothing to evaluate on", "evaluator.tasks=[hellaswag]")
