"""Check that the global batch divides into micro-batches and that samples fit into the model."""

from collections.abc import Iterator, Mapping
from typing import Any

from recipes.config.mesh import count_data_ranks
from recipes.config.ranks import get_ranks
from recipes.config.signature import find_signature
from recipes.config.traits import takes_steps
from recipes.errors import ConfigError
from recipes.numerics.accumulation import Accumulation, divide


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
            accumulation = divide(
                global_batch_size=config["global_batch_size"],
                micro_batch_size=config["micro_batch_size"],
                num_devices=count_data_ranks(config, world_size),
                accumulate_grad_batches=accumulate,
            )
        except ConfigError as mistake:
            yield mistake
        else:
            yield from _check_batch_norm(config, accumulation, world_size)
    max_seq_len = config["model"].get("max_seq_len")
    data_seq_len = config["data"].get("seq_len")
    if max_seq_len is not None and data_seq_len is not None and data_seq_len > max_seq_len:
        yield ConfigError(
            f"seq_len={data_seq_len}",
            f"the model accepts at most model.max_seq_len={max_seq_len} tokens",
            f"seq_len={max_seq_len}",
        )


def _check_batch_norm(config: Mapping[str, Any], accumulation: Accumulation, world_size: int) -> Iterator[ConfigError]:
    """Check that batch norm has more than one value per channel, without which torch raises an error in training."""
    model, data = config["model"], config["data"]
    stride = find_signature(model["_target_"]).constants.get("batch_norm_stride")
    size = data.get("image_size", find_signature(data["_target_"]).constants.get("image_size"))
    if not takes_steps(config) or not isinstance(stride, int) or not isinstance(size, int):
        return
    pixels = stride if model.get("small_images") else 4 * stride
    is_synced = config["trainer"].get("sync_batchnorm") and world_size > 1
    if accumulation.micro_batch_size == 1 and size <= pixels and not is_synced:
        shown = (
            "micro_batch_size=1" if config["micro_batch_size"] else f"global_batch_size={config['global_batch_size']}"
        )
        smallest = 2 * count_data_ranks(config, world_size)
        batch = "" if config["global_batch_size"] % smallest == 0 else f" global_batch_size={smallest}"
        yield ConfigError(
            shown,
            f"one image of {size} x {size} leaves batch norm a single value per channel, which has no variance",
            f"micro_batch_size=2{batch}",
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
