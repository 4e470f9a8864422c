"""Check the activation checkpointing settings, also in combination with torch.compile."""

from collections.abc import Iterator, Mapping
from typing import Any

from recipes.config.check.types import to_setting
from recipes.config.traits import get_compile_mode, runs_elsewhere, takes_steps
from recipes.errors import ConfigError


def check_activation_checkpoint(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Check the settings of a run that takes steps; no other mode has a backward pass.

    Args:
        config: Composed config whose nodes match their signatures.
    """
    node = config["activation_checkpoint"]
    if not takes_steps(config) or "every_nth_block" not in node:  # a user-defined class
        return
    budget, every_nth = node.get("memory_budget"), node["every_nth_block"]
    if node.get("save_ops") == "products" and every_nth == 0:
        yield ConfigError(
            "activation_checkpoint.save_ops=products activation_checkpoint.every_nth_block=0",
            "it applies to recomputed blocks, and there are none",
            "activation_checkpoint=selective",
        )
    if budget is not None and every_nth > 0:
        yield ConfigError(
            f"activation_checkpoint.memory_budget={budget} activation_checkpoint.every_nth_block={every_nth}",
            "a block is recomputed by torch's partitioner or as a whole, not both",
            f"activation_checkpoint=memory_budget activation_checkpoint.memory_budget={budget}",
        )
    if budget is not None and not _may_compile(config):
        compiles = to_setting(config["compile"])
        yield ConfigError(
            f"activation_checkpoint.memory_budget={budget} compile={compiles}",
            "torch's partitioner, which chooses what to recompute, sees compiled blocks only"
            + (", and auto compiles on a GPU only" if compiles == "auto" else ""),
            "compile=true, or activation_checkpoint=selective",
        )
    if node.get("offload") and get_compile_mode(config) == "reduce-overhead":
        yield ConfigError(
            "activation_checkpoint.offload=true compile=reduce-overhead",
            "a CUDA graph keeps its memory, so nothing would leave the device",
            "compile=default, or activation_checkpoint.offload=false",
        )


def _may_compile(config: Mapping[str, Any]) -> bool:
    """Return whether blocks are compiled; other machines may have the GPU that `auto` asks for."""
    return get_compile_mode(config) is not None or (config["compile"] == "auto" and runs_elsewhere(config))
