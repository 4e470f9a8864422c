"""What the rollouts of a policy take beside its steps: the cache of keys and values, and the time of their tokens.

Completions are sampled one token of each at a time, so that every token reads all weights: it is memory traffic and the
launches of kernels that take the time, not arithmetic.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from recipes.config.resolved import ResolvedRun
from recipes.generation.window import make_cache, takes_cache
from recipes.model import LanguageModel
from recipes.plan.measured import OperatorTimer, time_token
from recipes.plan.memory import MASTER
from recipes.plan.plan import REWARD_MODELS, Plan, gib, size_unit
from recipes.plan.roofline import Rates
from recipes.plan.trace import FROZEN, OPTIMIZER, WEIGHTS
from recipes.plan.unroll import block_kinds
from recipes.precision import Precision
from recipes.rollout import Rollout


@dataclass(frozen=True, kw_only=True)
class RolloutCost:
    """Cost of the rollouts of a rank.

    Attributes:
        num_rows: Completions that are sampled at a time.
        num_batches: How often, in a rollout.
        max_tokens: Most tokens of a row, prompt and completion.
        max_new_tokens: Most tokens of a completion.
        cache_bytes: Keys and values of these rows; None: the model keeps them in a way of its own.
        held_bytes: Weights, optimizer state, frozen and reward models, which stay while it samples.
        reference_bytes: Part of these that is the frozen copy.
        seconds: Time of a rollout whose completions are all of the greatest length, without reading the prompts; None:
            unknown.
        again_seconds: Time of the forward passes that follow it, for log-probabilities, values and the reference; None:
            unknown.
        step_seconds: Time of a step without these; None: unknown.
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
    again_seconds: float | None
    step_seconds: float | None
    num_iterations: int
    fits: bool | None

    @property
    def shares(self) -> dict[str, float] | None:
        """Fractions of the steps from one rollout to the next, without rewards; None: unknown."""
        if self.seconds is None or self.again_seconds is None or self.step_seconds is None:
            return None
        parts = {
            "rollout": self.seconds,
            "log-probabilities": self.again_seconds,
            "training": self.num_iterations * self.step_seconds,
        }
        return {name: part / sum(parts.values()) for name, part in parts.items()}


def plan_rollouts(resolved: ResolvedRun, planned: Plan, *, rates: Rates | OperatorTimer | None) -> RolloutCost | None:
    """Return the cost of the rollouts; None: the run samples none.

    Args:
        resolved: The run.
        planned: Its plan.
        rates: Of a device, or what times its operators; None: unknown.
    """
    node = resolved.config["rollout"]
    if not node:
        return None
    accumulation, precision = planned.accumulation, cast(Precision, resolved.make("precision"))
    of_rank = accumulation.micro_batch_size * accumulation.num_micro_batches
    num_rows = min(node.get("rows_at_a_time") or of_rank, of_rank)
    num_batches, max_new_tokens = -(-of_rank // num_rows), int(node["max_new_tokens"])
    max_tokens = int(resolved.seq_len or max_new_tokens)
    with torch.device("meta"):
        model: Any = resolved.make_model()
    values = _count_cached_values(model, max_tokens)
    shards, itemsize = planned.mesh.tensor, precision.compute_dtype.itemsize
    cache_bytes = None if values is None else values * num_rows * itemsize // shards
    held = planned.moments[0].held
    held_bytes = sum(held.get(kind, 0) for kind in (WEIGHTS, MASTER, OPTIMIZER, FROZEN, REWARD_MODELS))
    token_seconds = None
    if isinstance(rates, OperatorTimer):
        token_seconds = time_token(
            resolved.make_model,
            block_kinds(model, recomputes=lambda _: False),
            num_rows=num_rows,
            length=max_tokens - max_new_tokens // 2,  # of a cache that fills up meanwhile
            sampling=cast(Rollout, resolved.make("rollout")).sampling,
            precision=precision,
            device=rates.device,
        )
    elif rates is not None and cache_bytes is not None and planned.times is not None:
        weight_bytes = planned.num_parameters * precision.param_dtype.itemsize // shards
        read = weight_bytes + cache_bytes * (1 - max_new_tokens / 2 / max_tokens)
        launches = planned.times.step.of("forward/").num_launches * rates.launch_seconds[0]  # nothing is compiled
        token_seconds = max(read / (rates.bandwidth * rates.memory), launches)
    loss: Any = resolved.make("loss")
    num_passes = int(loss.needs_values or node["num_iterations"] > 1) + int(loss.needs_reference)
    times = planned.times
    return RolloutCost(
        num_rows=num_rows,
        num_batches=num_batches,
        max_tokens=max_tokens,
        max_new_tokens=max_new_tokens,
        cache_bytes=cache_bytes,
        held_bytes=held_bytes,
        reference_bytes=held.get(FROZEN, 0),
        seconds=None if token_seconds is None else num_batches * max_new_tokens * token_seconds,
        again_seconds=None if times is None else num_passes * accumulation.num_micro_batches * times.forward_seconds,
        step_seconds=None if times is None else times.step_seconds,
        num_iterations=int(node["num_iterations"]),
        fits=None if cache_bytes is None else cache_bytes + held_bytes <= planned.limit_bytes,
    )


@torch.no_grad()
def _count_cached_values(model: LanguageModel, num_tokens: int) -> int | None:
    """Return the values that a model on the meta device caches of a row; None: its cache does not count them."""
    if not takes_cache(model):
        return None
    with torch.device("meta"):
        cache = make_cache(model, capacity=1, padding=None)
        model(torch.zeros(1, 1, dtype=torch.int64), cache=cache)
    found: int | None = cache.count_values(num_tokens) if hasattr(cache, "count_values") else None
    return found


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
        yield f"  time            {cost.seconds:9.3g} s {share}, with completions of the greatest length"
    if (shares := cost.shares) is not None:
        shown = ", ".join(f"{name} {part:.0%}" for name, part in shares.items() if part)
        yield f"  shares            {shown}; rewards are yours: mode=preflight times them"


def as_json(cost: RolloutCost) -> dict[str, Any]:
    """Return the cost for `plan.json`."""
    return {
        "rows": cost.num_rows,
        "batches": cost.num_batches,
        "cache_gib": None if cost.cache_bytes is None else round(gib(cost.cache_bytes), 4),
        "held_gib": round(gib(cost.held_bytes), 4),
        "reference_gib": round(gib(cost.reference_bytes), 4),
        "seconds": cost.seconds,
        "shares": cost.shares,
        "fits": cost.fits,
    }
