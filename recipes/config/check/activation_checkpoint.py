"""Check the activation checkpointing settings, also in combination with torch.compile."""

from collections.abc import Iterator

from recipes.config.check.types import to_setting
from recipes.config.resolved import ResolvedRun
from recipes.errors import ConfigError


def check_activation_checkpoint(run: ResolvedRun) -> Iterator[ConfigError]:
    """Check the settings of a run that takes steps; no other mode has a backward pass.

    Args:
        run: Composed run whose nodes match their signatures.
    """
    config, node = run.config, run.config["activation_checkpoint"]
    if not run.mode.takes_steps or "every_nth_block" not in node:  # a user-defined class
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
    if budget is not None and not _may_compile(run):
        compiles = to_setting(config["compile"])
        yield ConfigError(
            f"activation_checkpoint.memory_budget={budget} compile={compiles}",
            "torch's partitioner, which chooses what to recompute, sees compiled blocks only"
            + (", and auto compiles on a GPU only" if compiles == "auto" else ""),
            "compile=true, or activation_checkpoint=selective",
        )
    if node.get("offload") and run.compile_mode == "reduce-overhead":
        yield ConfigError(
            "activation_checkpoint.offload=true compile=reduce-overhead",
            "a CUDA graph keeps its memory, so nothing would leave the device",
            "compile=default, or activation_checkpoint.offload=false",
        )


def _may_compile(run: ResolvedRun) -> bool:
    """Return whether blocks are compiled; other machines may have the GPU that `auto` asks for."""
    return run.compile_mode is not None or (run.config["compile"] == "auto" and run.runs_elsewhere)
