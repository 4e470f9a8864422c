"""Sums that must divide, and lengths that must fit."""

from collections.abc import Iterator, Mapping
from typing import Any

from recipes.accumulation import divide
from recipes.mistake import Mistake


def check_batches(config: Mapping[str, Any], world_size: int | None) -> Iterator[Mistake]:
    """The global batch into micro-batches; the sample into the model's window.

    Args:
        config: Whole and bound.
        world_size: Ranks of the run; None where they are a mistake of their own.
    """
    positive = (config["global_batch_size"], config["micro_batch_size"] or 1)
    accumulate = config["trainer"]["accumulate_grad_batches"]
    if world_size is not None and min(*positive, accumulate or 1) > 0:
        try:
            divide(
                global_batch_size=config["global_batch_size"],
                micro_batch_size=config["micro_batch_size"],
                num_devices=world_size,
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
