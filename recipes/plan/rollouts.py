"""What the rollouts of a policy take beside its steps: the cache of keys and values, and the time of their tokens.

Completions are sampled one token of each at a time, so that every token reads all weights: it is memory traffic that
takes the time, not arithmetic.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from recipes.config.resolved import ResolvedRun
from recipes.generation.window import takes_cache
from recipes.model import KeyValueCache, LanguageModel
from recipes.plan.memory import MASTER
from recipes.plan.plan import Plan, gib, size_unit
from recipes.plan.roofline import Rates
from recipes.plan.trace import FROZEN, OPTIMIZER, WEIGHTS
from recipes.precision import Precision


@dataclass(frozen=True, kw_only=True)
class RolloutCost:
    """Cost of the rollouts of a rank.

    Attributes:
        num_rows: Completions that are sampled at a time.
        num_batches: How often, in a rollout.
        max_tokens: Most tokens of a row, prompt and completion.
        max_new_tokens: Most tokens of a completion.
        cache_bytes: Keys and values of these rows; None: the model keeps them in a way of its own.
        held_bytes: Weights, optimizer state and frozen models, which stay while it samples.
        reference_bytes: Part of these that is the frozen copy.
        seconds: Time of a rollout whose completions are all of the greatest length, without reading the prompts; None:
            unknown.
        num_iterations: Steps that learn from a rollout.
        fits: Whether cache and held bytes fit into a device; None: unknown.
    """

    num_rows: int
    num_batches: int
    max_tokens: int
    max_new_tokens: int
    cache_bytes: int | None
    held_bytes: int
    reference_bytes: int
    seconds: float | None
    num_iterations: int
    fits: bool | None


def plan_rollouts(resolved: ResolvedRun, planned: Plan, *, rates: Rates | None) -> RolloutCost | None:
    """Return the cost of the rollouts; None: the run samples none.

    Args:
        resolved: The run.
        planned: Its plan.
        rates: Of a device; None: unknown.
    """
    node = resolved.config["rollout"]
    if not node:
        return None
    accumulation, precision = planned.accumulation, cast(Precision, resolved.make("precision"))
    of_rank = accumulation.micro_batch_size * accumulation.num_micro_batches
    num_rows = min(node.get("rows_at_a_time") or of_rank, of_rank)
    num_batches, max_new_tokens = -(-of_rank // num_rows), int(node["max_new_tokens"])
    max_tokens = int(resolved.seq_len or max_new_tokens)
    values = _count_cached_values(resolved)
    shards, itemsize = planned.mesh.tensor, precision.compute_dtype.itemsize
    cache_bytes = None if values is None else values * max_tokens * num_rows * itemsize // shards
    held = planned.moments[0].held
    held_bytes = sum(held.get(kind, 0) for kind in (WEIGHTS, MASTER, OPTIMIZER, FROZEN))
    seconds = None
    if rates is not None and cache_bytes is not None:
        weight_bytes = planned.num_parameters * precision.param_dtype.itemsize // shards
        read = weight_bytes + cache_bytes * (1 - max_new_tokens / 2 / max_tokens)  # of a cache that fills up meanwhile
        seconds = num_batches * max_new_tokens * read / (rates.bandwidth * rates.memory)
    return RolloutCost(
        num_rows=num_rows,
        num_batches=num_batches,
        max_tokens=max_tokens,
        max_new_tokens=max_new_tokens,
        cache_bytes=cache_bytes,
        held_bytes=held_bytes,
        reference_bytes=held.get(FROZEN, 0),
        seconds=seconds,
        num_iterations=int(node["num_iterations"]),
        fits=None if cache_bytes is None else cache_bytes + held_bytes <= planned.limit_bytes,
    )


def _count_cached_values(resolved: ResolvedRun) -> int | None:
    """Return the keys and values that a model keeps of a token, in all layers; None: in a way of its own."""
    with torch.device("meta"):
        model: Any = resolved.make_model()
        if not takes_cache(cast(LanguageModel, model)) or hasattr(model, "make_cache"):
            return None
        cache = KeyValueCache(num_layers=len(model.blocks), capacity=1)
        model(torch.zeros(1, 1, dtype=torch.int64), cache=cache)
    return cache.num_values


def describe_rollouts(cost: RolloutCost | None) -> Iterator[str]:
    """Yield a line for the rows, and for memory and time of a rollout; nothing without one."""
    if cost is None:
        return
    times = "" if cost.num_batches == 1 else f", {cost.num_batches} times"
    yield (
        f"rollout: {cost.num_rows} completions at a time on each rank{times}, of at most {cost.max_new_tokens} tokens,"
        f" {cost.max_tokens} with the prompt"
    )
    unit, unit_bytes = size_unit(cost.held_bytes)
    held = f"beside {cost.held_bytes / unit_bytes:,.2f} {unit} of weights and optimizer state"
    if cost.cache_bytes is None:
        yield f"  keys and values   unknown: the model keeps them in a way of its own; {held}"
    else:
        size, verdict = f"{cost.cache_bytes / unit_bytes:9.2f}", "fits" if cost.fits else "DOES NOT FIT"
        remedy = "" if cost.fits else f": rollout.rows_at_a_time={max(cost.num_rows // 2, 1)}"
        yield f"  keys and values {size} {unit} {held}: {verdict}{remedy}"
    if cost.reference_bytes:
        yield f"  reference       {cost.reference_bytes / unit_bytes:9.2f} {unit} of these: a frozen copy of the model"
    share = "in each step" if cost.num_iterations == 1 else f"once in {cost.num_iterations} steps"
    if cost.seconds is None:
        yield f"  time              unknown for this device, {share}; training logs rollout/time_fraction"
    else:
        yield (
            f"  time            {cost.seconds:9.3g} s {share}, at most: each token reads the weights and the cache, at"
            " the bandwidth of memory"
        )


def as_json(cost: RolloutCost) -> dict[str, Any]:
    """Return the cost for `plan.json`."""
    return {
        "rows": cost.num_rows,
        "batches": cost.num_batches,
        "cache_gib": None if cost.cache_bytes is None else round(gib(cost.cache_bytes), 4),
        "held_gib": round(gib(cost.held_bytes), 4),
        "reference_gib": round(gib(cost.reference_bytes), 4),
        "seconds": cost.seconds,
        "fits": cost.fits,
    }
