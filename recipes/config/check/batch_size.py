"""Check that the global batch divides into micro-batches and that samples fit into the model."""

from collections.abc import Iterator, Mapping
from typing import Any

from recipes.config.mesh import count_data_ranks
from recipes.config.ranks import get_ranks
from recipes.errors import ConfigError
from recipes.numerics.accumulation import divide


def check_batch_size(config: Mapping[str, Any], world_size: int | None) -> Iterator[ConfigError]:
    """Check the global batch against micro-batches and ranks, and the sequence length against the model.

    Args:
        config: Composed config whose nodes match their signatures.
        world_size: Number of ranks; None if it is invalid, which is reported separately.
    """
    accumulate = config["trainer"]["accumulate_grad_batches"]
    counts = (config["global_batch_size"], config["micro_batch_size"], accumulate)
    # 0 is out of range and reported by that check
    if world_size is not None and all(count is None or count > 0 for count in counts):
        try:
            divide(
                global_batch_size=config["global_batch_size"],
                micro_batch_size=config["micro_batch_size"],
                num_devices=count_data_ranks(config, world_size),
                accumulate_grad_batches=accumulate,
            )
        except ConfigError as mistake:
            yield mistake
    max_seq_len = config["model"].get("max_seq_len")
    data_seq_len = config["data"].get("seq_len")
    if max_seq_len is not None and data_seq_len is not None and data_seq_len > max_seq_len:
        yield ConfigError(
            f"seq_len={data_seq_len}",
            f"the model accepts at most model.max_seq_len={max_seq_len} tokens",
            f"seq_len={max_seq_len}",
        )


def count_ranks(config: Mapping[str, Any]) -> tuple[int | None, list[ConfigError]]:
    """Return the number of ranks of a run, None if it is invalid, and the errors.

    Imports torch only on a machine with a GPU that several ranks may use.
    """
    devices, num_nodes = config["trainer"]["devices"], config["trainer"]["num_nodes"]
    if not _is_valid(devices):
        shown = str(devices).replace(" ", "")
        reason = "it takes a positive number, a list of GPUs, or auto"
        return None, [ConfigError(f"trainer.devices={shown}", reason, "trainer.devices=auto")]
    if num_nodes < 1:
        return None, []  # reported by the check of ranges
    try:
        return get_ranks(config).world_size, []
    except ConfigError as mistake:
        return None, [mistake]


def _is_valid(devices: object) -> bool:
    if isinstance(devices, list):
        return bool(devices) and len(set(devices)) == len(devices) and min(devices) >= 0
    return devices in ("auto", -1) or (isinstance(devices, int) and devices > 0)
