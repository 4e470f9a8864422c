"""Sums that must divide, and lengths that must fit."""

from collections.abc import Iterator, Mapping
from typing import Any

from recipes.accumulation import divide
from recipes.mistake import Mistake


def num_devices(trainer: Mapping[str, Any]) -> int:
    """Ranks of a run, as far as the config says; `auto` counts as one."""
    devices = trainer["devices"]
    if isinstance(devices, list):
        per_node = len(devices)
    elif isinstance(devices, int) and devices > 0:
        per_node = devices
    else:
        per_node = 1
    return per_node * int(trainer["num_nodes"])


def check_batches(config: Mapping[str, Any]) -> Iterator[Mistake]:
    """The global batch into micro-batches; the sample into the model's window."""
    positive = (config["global_batch_size"], config["micro_batch_size"] or 1)
    accumulate = config["trainer"]["accumulate_grad_batches"]
    if min(*positive, accumulate or 1) > 0:
        try:
            divide(
                global_batch_size=config["global_batch_size"],
                micro_batch_size=config["micro_batch_size"],
                num_devices=num_devices(config["trainer"]),
                accumulate_grad_batches=accumulate,
            )
        except Mistake as mistake:
            yield mistake
    longest = config["model"].get("max_seq_len")
    data_seq_len = config["data"].get("seq_len")
    if longest is not None and data_seq_len is not None and data_seq_len > longest:
        yield Mistake(
            f"seq_len={data_seq_len}",
            f"the model sees at most model.max_seq_len={longest} tokens",
            f"seq_len={longest}",
        )
