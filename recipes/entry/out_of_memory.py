"""Memory is full: the three cheapest ways out, as words to type. Reads the config, imports no torch."""

import contextlib
import errno
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recipes.config.compose import Composed
from recipes.config.traits import get_traits
from recipes.numerics.accumulation import divide
from recipes.run_folder import OOM_FOLDER, has_checkpoint, write_atomically
from recipes.runtime.failure import read_peer_error

_MAX_WAYS = 3
# an option of strategy/ -> what shards or moves more of the state out of device memory, first step first
_NEXT_STAGE = {
    "single": "strategy=fsdp strategy.cpu_offload=true",
    "ddp": "strategy=fsdp",
    "hsdp": "strategy=fsdp",
    "fsdp": "strategy.cpu_offload=true",
    "deepspeed_stage_1": "strategy=deepspeed_stage_2",
    "deepspeed_stage_2": "strategy=deepspeed_stage_3",
    "deepspeed_stage_2_offload": "strategy=deepspeed_stage_3_offload",
    "deepspeed_stage_3": "strategy=deepspeed_stage_3_offload",
    "deepspeed_stage_3_offload": "strategy=deepspeed_stage_3_nvme strategy.nvme_path=/local_nvme",
}


def remedies(
    composed: Composed, *, world_size: int, of_host: bool = False
) -> Iterator[tuple[str, str]]:
    """What to type, and what it costs; the cheapest first, of all that this run does not do yet.

    Args:
        composed: The run.
        world_size: Its ranks.
        of_host: Whether it is the host's memory that is full, where nothing can be moved to.
    """
    config = composed.config
    plan = divide(
        global_batch_size=config["global_batch_size"],
        micro_batch_size=config["micro_batch_size"],
        num_devices=world_size,
        accumulate_grad_batches=config["trainer"]["accumulate_grad_batches"],
    )
    if (smaller := _smaller(plan.micro_batch_size)) is not None:
        word = f"micro_batch_size={smaller}"
        if config["trainer"]["accumulate_grad_batches"] is not None:
            word += " trainer.accumulate_grad_batches=null"
        passes = plan.num_micro_batches * plan.micro_batch_size // smaller
        yield word, f"the same global batch in {passes} passes: the same curve, smaller products"
    if not config["activation_checkpoint"]["every_nth_block"]:
        word = "activation_checkpoint=every_block"
        yield word, "activations of one block at a time: the same curve, about a third more compute"
    strategy = _stage(composed)
    yield from _next_stage(strategy, config["strategy"], of_host=of_host)
    if config["precision"]["name"] == "32-true":
        yield (
            "precision=bf16-mixed",
            "activations of half the size; weights and moments stay float32",
        )


def _stage(composed: Composed) -> str:
    """The option of strategy/; of a frozen config, which does not name it, from what it says."""
    if "strategy" in composed.choices:
        return composed.choices["strategy"]
    node = composed.config["strategy"]
    offloaded = {"cpu": "_offload", "nvme": "_nvme"}
    return get_traits(node).option + offloaded.get(str(node.get("offload_optimizer")), "")


def _next_stage(strategy: str, node: dict[str, Any], *, of_host: bool) -> Iterator[tuple[str, str]]:
    offloads = strategy == "fsdp" and node["cpu_offload"]
    if strategy not in _NEXT_STAGE or offloads:
        return
    word = _NEXT_STAGE[strategy]
    moves = "offload" in word or "nvme" in word
    if not moves:
        yield word, "the same curve from more parts of weights, gradients and moments"
    elif not of_host:
        yield word, "the same curve with weights and moments in host memory or on a disk; slower"


def _smaller(micro_batch_size: int) -> int | None:
    """The largest divisor up to half of it."""
    halves = range(micro_batch_size // 2, 0, -1)
    return next((size for size in halves if micro_batch_size % size == 0), None)


def describe_out_of_memory(error: BaseException, composed: Composed, *, world_size: int) -> str:
    """What a person reads instead of a traceback."""
    first_line = str(error).partition("\n")[0][:200]
    lines = [f"Out of memory: {first_line}"]
    ways = [*remedies(composed, world_size=world_size, of_host=_is_of_host(error))]
    if not composed.trains:
        ways = []  # what does not train runs on one device, without a backward pass
    ways = ways[:_MAX_WAYS]
    width = max((len(word) for word, _ in ways), default=0)
    if ways:
        lines.append("Add one of these to what you typed, the cheapest first:")
        lines += [f"  {word:<{width}}  {why}" for word, why in ways]
    else:
        lines.append(
            "A smaller model, shorter samples, or a device with more memory is what is left."
        )
    if any((composed.run_folder / OOM_FOLDER).glob("rank_*")):
        lines.append(f"What filled it is in {composed.run_folder / OOM_FOLDER}")
    if has_checkpoint(composed.run_folder):
        lines.append(f"To go on from the last checkpoint, also: resume={composed.run_folder}")
    return "\n".join(lines)


def _is_of_host(error: BaseException | None) -> bool:
    while error is not None:
        text = str(error)
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            return True
        if "DefaultCPUAllocator" in text or "Cannot allocate memory" in text:
            return True
        error = error.__cause__ or error.__context__
    return False


def write_error_report(run_folder: Path, *, rank: int, step: int, error: str) -> None:
    """A rank that is not the first tells no events: it leaves its own beside them."""
    folder = run_folder / OOM_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    told = {"time": round(time.time(), 3), "step": step, "event": "oom", "rank": rank}
    told |= {"error": error}
    write_atomically(folder / f"rank_{rank:05d}.json", json.dumps(told) + "\n")


def log_exit(run_folder: Path, events_file: Path) -> None:
    """Once all ranks have ended: what the first could not tell, because another one's end has killed it."""
    word = read_peer_error(run_folder)
    if word is None or not events_file.exists():
        return
    events = [line for line in events_file.read_text().splitlines() if '"event": "oom"' in line]
    if any(f'"rank": {word["rank"]}' in line for line in events):
        return
    end = {key: word[key] for key in ("time", "step")} | {"event": "end"}
    end |= {"status": "out_of_memory", "error": word["error"]}
    with contextlib.suppress(OSError), events_file.open("a") as file:
        file.write(json.dumps(word) + "\n" + json.dumps(end) + "\n")
