"""Numbers outside the range in which they mean something."""

from collections.abc import Iterator, Mapping
from typing import Any

from recipes.mistake import Mistake

# dotted key: (lowest, highest, may the bounds themselves be taken, what the number is)
_RANGES: dict[str, tuple[float, float, bool, str]] = {
    "seed": (0, 2**63 - 1, True, "a seed"),
    "global_batch_size": (1, float("inf"), True, "a number of samples"),
    "micro_batch_size": (1, float("inf"), True, "a number of samples"),
    "seq_len": (1, float("inf"), True, "a number of tokens"),
    "log_every": (1, float("inf"), True, "a number of optimizer steps"),
    "eval_every": (1, float("inf"), True, "a number of optimizer steps"),
    "save_every": (1, float("inf"), True, "a number of optimizer steps"),
    "eval_samples": (1, float("inf"), True, "a number of samples"),
    "trainer.max_steps": (1, float("inf"), True, "a number of optimizer steps"),
    "trainer.devices": (1, float("inf"), True, "a number of devices"),
    "trainer.num_nodes": (1, float("inf"), True, "a number of nodes"),
    "trainer.accumulate_grad_batches": (1, float("inf"), True, "a number of micro-batches"),
    "trainer.gradient_clip_val": (0, float("inf"), False, "a gradient norm"),
    "optimizer.lr": (0, float("inf"), False, "a learning rate"),
    "optimizer.eps": (0, float("inf"), False, "an epsilon"),
    "optimizer.weight_decay": (0, float("inf"), True, "a weight decay"),
    "optimizer.momentum": (0, 1, True, "a momentum"),
    "scheduler.final_fraction": (0, 1, True, "a fraction"),
    "scheduler.start_fraction": (0, 1, True, "a fraction"),
    "scheduler.warmup_fraction": (0, 1, True, "a fraction"),
    "scheduler.warmup_steps": (0, float("inf"), True, "a number of optimizer steps"),
    "scheduler.decay_steps": (0, float("inf"), True, "a number of optimizer steps"),
    "scheduler.cooldown_steps": (0, float("inf"), True, "a number of optimizer steps"),
    "model.dropout": (0, 0.999, True, "a probability"),
    "data.val_fraction": (0, 0.9, False, "a fraction"),
    "checkpoint.keep_last": (1, float("inf"), True, "a number of checkpoints"),
    "loader.num_workers": (0, float("inf"), True, "a number of processes"),
    "mode.temperature": (0, float("inf"), True, "a temperature"),
    "mode.top_k": (1, float("inf"), True, "a number of tokens"),
    "mode.top_p": (0, 1, True, "a probability"),
    "mode.num_tokens": (1, float("inf"), True, "a number of tokens"),
    "mode.num_samples": (1, float("inf"), True, "a number of texts"),
}


def check_ranges(config: Mapping[str, Any]) -> Iterator[Mistake]:
    """Every number of the table that the config holds."""
    for key, (lowest, highest, closed, what) in _RANGES.items():
        value = _lookup(config, key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        inside = lowest <= value <= highest if closed else lowest < value < highest
        if not inside:
            bounds = _describe(lowest, highest, closed=closed)
            yield Mistake(f"{key}={value}", f"{what} is {bounds}", f"{key}=<{bounds}>")
    for index, beta in enumerate(_lookup(config, "optimizer.betas") or []):
        if not 0 <= beta < 1:
            yield Mistake(
                f"optimizer.betas[{index}]={beta}",
                "a decay rate is from 0 to below 1",
                "'optimizer.betas=[0.9,0.95]'",
            )


def _describe(lowest: float, highest: float, *, closed: bool) -> str:
    if highest in (float("inf"), 2**63 - 1):
        return f"at least {lowest:g}" if closed else f"above {lowest:g}"
    return (
        f"from {lowest:g} to {highest:g}" if closed else f"above {lowest:g} and below {highest:g}"
    )


def _lookup(config: Mapping[str, Any], key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return None
        node = node[part]
    return node
