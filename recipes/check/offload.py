"""Offload words where the strategy cannot follow them: what exists instead."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recipes.check.types import written
from recipes.mistake import Mistake

_FSDP = "strategy=fsdp strategy.cpu_offload=true"
_NVME = "strategy=deepspeed_stage_3_nvme strategy.nvme_path="
# what keeps on no device what the word names
_INSTEAD = {
    "cpu_offload": f"{_FSDP}, or strategy=deepspeed_stage_2_offload",
    "offload_optimizer": f"strategy=deepspeed_stage_2_offload, or {_FSDP}",
    "offload_parameters": f"strategy=deepspeed_stage_3_offload, or {_FSDP}",
    "nvme_path": f"{_NVME}<folder>",
}
_OPTIONS = {
    "SingleDevice": "single",
    "DataParallel": "ddp",
    "FullyShard": "fsdp",
    "HybridShard": "hsdp",
    "Zero": "deepspeed_stage_{stage}",
}


def engine_of(strategy: Mapping[str, Any]) -> str:
    """The class that a strategy's node names: `DataParallel`, `Zero`, …"""
    return str(strategy["_target_"]).rpartition(".")[2]


def option_of(strategy: Mapping[str, Any]) -> str:
    """How a strategy is typed, by engine and stage: `strategy=deepspeed_stage_2`."""
    engine = engine_of(strategy)
    option = _OPTIONS[engine] if engine in _OPTIONS else engine
    stage = strategy["stage"] if "stage" in strategy else "…"
    return f"strategy={option.format(stage=stage)}"


def misplaced_offload(
    strategy: Mapping[str, Any], word: str, value: object, typed: str
) -> Mistake | None:
    """The mistake in an offload word that a strategy does not take.

    Args:
        strategy: Its node.
        word: What comes after `strategy.`.
        value: What it was set to.
        typed: How the message names it.

    Returns:
        None where it is no offload word, or asks for no offload: there is nothing to offer instead.
    """
    if word not in _INSTEAD or value in (None, False, ""):
        return None
    option = option_of(strategy)
    if word == "nvme_path":
        why, instead = f"{option} writes nothing to a disk", f"{_NVME}{value}"
    elif value == "nvme":
        why, instead = f"{option} writes nothing to a disk", _INSTEAD["nvme_path"]
    elif engine_of(strategy) in ("FullyShard", "HybridShard"):
        why = f"{option} offloads weights, gradients and optimizer state together"
        instead = "strategy.cpu_offload=true"
    elif engine_of(strategy) != "Zero":
        why, instead = f"{option} keeps everything on its devices", _INSTEAD[word]
    elif "offload_optimizer" in strategy and strategy["offload_optimizer"] is not None:
        why, instead = f"{option} offloads already", f"nothing for strategy.{word}"
    else:
        why = f"{option} has words of its own for it"
        one = option.endswith("_1")  # of which there is no option
        instead = "strategy.offload_optimizer=cpu" if one else f"{option}_offload"
    return Mistake(typed, why, instead)


def check_offload(strategy: Mapping[str, Any]) -> Iterator[Mistake]:
    """What ZeRO is told to offload: whether the stage can, and whether the disk's folder is there."""
    if engine_of(strategy) != "Zero":
        return
    optimizer, parameters = strategy["offload_optimizer"], strategy["offload_parameters"]
    whole = strategy["stage"] < 3
    if whole and parameters is not None:
        yield Mistake(
            f"strategy.offload_parameters={parameters}",
            f"{option_of(strategy)} keeps the parameters whole on every rank",
            _INSTEAD["nvme_path"] if parameters == "nvme" else "strategy=deepspeed_stage_3_offload",
        )
    if whole and optimizer == "nvme":  # DeepSpeed 0.19.8 would take host memory without a word
        yield Mistake(
            "strategy.offload_optimizer=nvme",
            f"{option_of(strategy)} offloads to host memory alone",
            f"strategy.offload_optimizer=cpu, or {_INSTEAD['nvme_path']}",
        )
    if not whole or "nvme" not in (optimizer, parameters):
        yield from _disk(strategy["nvme_path"], on_disk(strategy))


def on_disk(strategy: Mapping[str, Any]) -> str:
    """The settings that make ZeRO-3 use a disk, as they are typed; empty where none does."""
    words = ("offload_optimizer", "offload_parameters") if strategy["stage"] == 3 else ()
    return " ".join(f"strategy.{word}=nvme" for word in words if strategy[word] == "nvme")


def _disk(path: str | None, asked: str) -> Iterator[Mistake]:
    typed, another = f"strategy.nvme_path={written(path)}", "strategy.nvme_path=<folder>"
    if path is None and asked:
        yield Mistake(asked, "no folder on an NVMe disk is named", another)
    elif path is not None and not asked:
        yield Mistake(typed, "nothing is offloaded to it", f"{_NVME}{path}")
    elif path is not None and not Path(path).is_dir():
        yield Mistake(typed, "there is no such folder", another)
    elif path is not None and not os.access(path, os.W_OK | os.X_OK):
        yield Mistake(typed, "the folder cannot be written to", another)
