"""Find the number of classes where nothing sets it, and leave out the metrics for which there are too few."""

import ast
import re
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from recipes.config.signature import find_signature

NAMES = ("vocab_size", "num_classes")  # arguments of a model that say how many classes there are


def take_num_classes(config: DictConfig) -> None:
    """Set the number of classes of a model of one's own to the default in the signature of its class.

    What refers to `model.num_classes`, such as a metric, then has it, too.
    """
    model = config.get("model")
    if not OmegaConf.is_dict(model) or any(name in model for name in NAMES):
        return
    parameters = find_signature(model.get("_target_")).parameters
    for name in NAMES:
        value = parameters[name].value if name in parameters else None
        if isinstance(value, ast.Constant) and type(value.value) is int:
            with open_dict(model):
                model[name] = value.value


def leave_out_top_k(config: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Leave out the metrics of the k most probable classes where there are fewer than k, unless they are typed.

    Args:
        config: Resolved config, which is changed.
        overrides: Overrides that it was composed of.

    Returns:
        What is left out and why, for the log.
    """
    metrics, model = config.get("metrics"), config.get("model")
    if not isinstance(metrics, dict) or not isinstance(model, dict):
        return []
    number = model.get("vocab_size", model.get("num_classes"))
    left_out = []
    for name, node in metrics.items():
        top_k = node.get("top_k") if isinstance(node, dict) else None
        is_typed = any(re.match(rf"\+*metrics\.{re.escape(name)}[.=]", override) for override in overrides)
        if isinstance(top_k, int) and isinstance(number, int) and top_k > number and not is_typed:
            metrics[name] = None
            left_out.append(f"metrics.{name} is left out: it has top_k={top_k}, and the model has {number} classes")
    return left_out
