"""Sums that must divide, and lengths that must fit."""

from collections.abc import Iterator, Mapping
from typing import Any

from recipes.config.ranks import get_ranks
from recipes.errors import ConfigError
from recipes.numerics.accumulation import divide


def check_batch_size(config: Mapping[str, Any], world_size: int | None) -> Iterator[ConfigError]:
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
        except ConfigError as mistake:
            yield mistake
    longest = config["model"].get("max_seq_len")
    data_seq_len = config["data"].get("seq_len")
    if longest is not None and data_seq_len is not None and data_seq_len > longest:
        yield ConfigError(
            f"seq_len={data_seq_len}",
            f"the model sees at most model.max_seq_len={longest} tokens",
            f"seq_len={longest}",
        )


def count_ranks(config: Mapping[str, Any]) -> tuple[int | None, list[ConfigError]]:
    """The ranks of a run, None where they are a mistake; and that mistake.

    torch is asked only where there is a GPU and several ranks may use it.
    """
    devices, num_nodes = config["trainer"]["devices"], config["trainer"]["num_nodes"]
    if not _are_devices(devices):
        shown = str(devices).replace(" ", "")
        why = "it takes a number from 1, a list of GPUs, or auto"
        return None, [ConfigError(f"trainer.devices={shown}", why, "trainer.devices=auto")]
    if num_nodes < 1:
        return None, []  # out of its range, which is told there
    try:
        return get_ranks(config).world_size, []
    except ConfigError as mistake:
        return None, [mistake]


def _are_devices(devices: object) -> bool:
    if isinstance(devices, list):
        return bool(devices) and len(set(devices)) == len(devices) and min(devices) >= 0
    return devices in ("auto", -1) or (isinstance(devices, int) and devices > 0)
