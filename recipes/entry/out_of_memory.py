"""Advice after running out of memory: the cheapest overrides that reduce memory use, and settings that would fit."""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recipes.config.ranks import largest_divisor
from recipes.config.resolved import ResolvedRun
from recipes.config.traits import StrategyTraits
from recipes.entry.light_import import without_unused_packages
from recipes.errors import ConfigError
from recipes.files import append, tolerating, write_atomically
from recipes.run_folder import OOM_FOLDER, has_checkpoint
from recipes.runtime.failure import is_host_out_of_memory, read_oom_of_other_rank

_MAX_REMEDIES = 3
# of a parameter on one rank: float32 weight, gradient, two moments and average, and a copy of the weight in each dtype
_MOST_STATE_BYTES = 28
# strategy option -> overrides that shard the state further or move it out of device memory, next step first
_NEXT_STRATEGY = {
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


def describe_out_of_memory(error: BaseException, resolved: ResolvedRun, *, lists_remedies: bool = True) -> str:
    """Return the message to show instead of a traceback.

    Args:
        error: The error.
        resolved: The run.
        lists_remedies: Whether to list overrides; False where `advise` follows, which knows which of them suffice.
    """
    first_line = str(error).partition("\n")[0][:200]
    lines = [f"Out of memory: {first_line}"]
    takes = resolved.mode.takes_steps  # every other mode runs on one device, without a backward pass
    if lists_remedies or not takes:
        on_host = is_host_out_of_memory(error)
        options = [*remedies(resolved, of_host=on_host)][:_MAX_REMEDIES] if takes else []
        lines += _list_remedies(options)
    if any((resolved.run_folder / OOM_FOLDER).glob("rank_*")):
        lines.append(f"Memory dump: {resolved.run_folder / OOM_FOLDER}")
    if has_checkpoint(resolved.run_folder):
        lines.append(f"To resume from the last checkpoint, also add: resume={resolved.run_folder}")
    return "\n".join(lines)


def _list_remedies(options: Sequence[tuple[str, str]]) -> list[str]:
    if not options:
        return ["No override is left: use a smaller model, shorter samples, or a device with more memory."]
    width = max(len(override) for override, _ in options)
    listed = [f"  {override:<{width}}  {effect}" for override, effect in options]
    return ["Add one of these overrides, the cheapest first:", *listed]


def advise(resolved: ResolvedRun, *, report: str) -> list[str]:
    """Plan the run; return overrides that suffice, its memory estimate and settings that fit. Takes seconds and no GPU.

    Args:
        resolved: The run that ran out of memory.
        report: What the rank reported that ran out first.
    """
    if not resolved.mode.takes_steps:
        return []
    of_host = is_host_out_of_memory(RuntimeError(report))
    options = [*remedies(resolved, of_host=of_host)][:_MAX_REMEDIES]
    command = "the same command with mode=plan shows more"
    try:
        with without_unused_packages(resolved.list_targets()):
            from recipes.plan.advice import Planner, advise_settings, with_overrides
        from recipes.plan.plan import gib
        from recipes.plan.table import describe_place

        cluster = _find_cluster(resolved)
        planner = Planner(cluster)
        planned = planner.plan(resolved)
        moment, limit = planned.peak, planned.limit_bytes
        needed = f"{gib(moment.total):.2f} GiB ({describe_place(moment)}) of {gib(limit):.2f} GiB"
        if planned.fits:
            less = gib(moment.total) * 0.8 + gib(cluster.device.context_bytes)
            return [
                *_list_remedies(options),
                f"Plan: a rank needs {needed}: it fits, so something else fills the memory. To plan with less memory:"
                f" mode=plan plan.memory_gib={less:.2f}",
            ]
        changed = {option: with_overrides(resolved, option[0].split()) for option in options}
        enough = [option for option, config in changed.items() if config is not None and planner.plan(config).fits]
        return [
            *(_list_remedies(enough) if enough else []),
            f"Plan: a rank needs {needed}; {command}",
            *advise_settings(resolved, planner),
        ]
    except Exception as error:  # a second failure must not hide the first
        reason = str(error).partition("\n")[0][:200]
        return [*_list_remedies(options), f"No plan could be made ({type(error).__name__}: {reason}); {command}"]


def check_room(resolved: ResolvedRun, model: Any) -> None:
    """Refuse a run whose weights, gradients and optimizer state alone exceed the memory of a rank.

    Called before any of them is allocated: the kernel kills a process that fills the memory, without a word. Only a
    large model is planned, which takes seconds.

    Args:
        resolved: The run.
        model: Unsharded model without storage.

    Raises:
        ConfigError: It cannot fit.
    """
    cluster = _find_cluster(resolved)
    is_gpu = cluster.device.full_name is not None
    num_sharing = 1 if is_gpu else resolved.ranks.per_node  # ranks on CPUs share the memory of their node
    memory_bytes = cluster.memory_bytes // num_sharing
    if sum(parameter.numel() for parameter in model.parameters()) * _MOST_STATE_BYTES <= memory_bytes:
        return
    from recipes.plan.advice import find_strategy
    from recipes.plan.plan import plan_state, size_unit

    needed = plan_state(resolved, cluster)
    if needed is None or needed <= memory_bytes:
        return
    found = find_strategy(resolved, cluster, limit_bytes=memory_bytes)
    elsewhere = "a smaller model=, more devices, or mode=plan plan.hardware=h100x8 to plan it on others"
    chosen = [f"{group}={resolved.choices[group]}" for group in ("model", "strategy") if group in resolved.choices]
    unit, unit_bytes = size_unit(needed)
    holder = f"each of {num_sharing} ranks" if num_sharing > 1 else "the GPU" if is_gpu else "this machine"
    raise ConfigError(
        " ".join(chosen) or "model=…",
        f"weights, gradients and optimizer state of a rank take {needed / unit_bytes:,.2f} {unit}, even without"
        f" activations, and {holder} has {memory_bytes / unit_bytes:,.2f} {unit}, unless plan.memory_gib= says"
        " otherwise",
        elsewhere if found is None else f"{' '.join(found)}, {elsewhere}",
    )


def _find_cluster(resolved: ResolvedRun) -> Any:
    from recipes.plan.hardware import find_cluster

    return find_cluster(
        "auto",
        per_node=resolved.ranks.per_node,
        num_nodes=resolved.ranks.num_nodes,
        interconnect=None,
        memory_gib=resolved.memory_gib,
    )


def remedies(resolved: ResolvedRun, *, of_host: bool = False) -> Iterator[tuple[str, str]]:
    """Yield overrides that reduce memory use and that the run does not use yet, cheapest first.

    Args:
        resolved: The run.
        of_host: Whether host memory is full, which rules out offloading to it.

    Yields:
        The override, and its effect and cost.
    """
    plan = resolved.accumulation
    if plan.micro_batch_size > 1:
        smaller = largest_divisor(plan.micro_batch_size, most=plan.micro_batch_size // 2)
        override = f"micro_batch_size={smaller}"
        if resolved.accumulate_grad_batches is not None:
            override += " trainer.accumulate_grad_batches=null"
        count = plan.num_micro_batches * plan.micro_batch_size // smaller
        yield (
            override,
            f"the same global batch in {count} micro-batches: same curve, smaller matmuls",
        )
    if not resolved.recomputes_every_block:
        yield (
            "activation_checkpoint=full",
            "keep activations of one block at a time: same curve, about a third more compute",
        )
    yield from _next_strategy(_strategy_option(resolved), resolved.strategy, of_host=of_host)
    if resolved.precision == "32-true":
        yield (
            "precision=bf16-mixed",
            "activations of half the size; weights and optimizer state stay float32",
        )


def _strategy_option(resolved: ResolvedRun) -> str:
    """Return the option of the group strategy/, derived from the node since a frozen config does not name it."""
    if "strategy" in resolved.choices:
        return resolved.choices["strategy"]
    suffixes = {"cpu": "_offload", "nvme": "_nvme"}
    return resolved.strategy.option + suffixes.get(str(resolved.strategy.offload_optimizer), "")


def _next_strategy(strategy: str, traits: StrategyTraits, *, of_host: bool) -> Iterator[tuple[str, str]]:
    offloads_already = strategy == "fsdp" and traits.cpu_offload
    if strategy not in _NEXT_STRATEGY or offloads_already:
        return
    override = _NEXT_STRATEGY[strategy]
    offloads = "offload" in override or "nvme" in override
    if not offloads:
        yield override, "shard more of weights, gradients and optimizer state: same curve"
    elif not of_host:
        yield override, "weights and optimizer state in host memory or on disk: same curve, slower"


def write_error_report(run_folder: Path, *, rank: int, step: int, error: str) -> None:
    """Write this rank's out-of-memory event to a separate file: only rank 0 writes events.jsonl."""
    path = run_folder / OOM_FOLDER / f"rank_{rank:05d}.json"
    event = {"time": round(time.time(), 3), "step": step, "event": "oom", "rank": rank}
    event |= {"error": error}
    with tolerating(path):  # a full disk must not replace the real error
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(event) + "\n")


def log_exit(run_folder: Path, events_file: Path) -> None:
    """Log the out-of-memory event of a rank other than 0 once all ranks have exited.

    That rank's failure may have killed rank 0 before it could write the event. The event is never logged twice.
    """
    event = read_oom_of_other_rank(run_folder)
    if event is None or not events_file.exists():
        return
    known = [line for line in events_file.read_text(encoding="utf-8").splitlines() if '"event": "oom"' in line]
    if any(f'"rank": {event["rank"]}' in line for line in known):
        return
    end = {key: event[key] for key in ("time", "step")} | {"event": "end"}
    end |= {"status": "out_of_memory", "error": event["error"]}
    with tolerating(events_file):
        append(events_file, json.dumps(event) + "\n" + json.dumps(end) + "\n")
