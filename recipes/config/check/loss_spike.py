"""Rules of `callbacks.loss_spike` that cannot work together, or on this machine."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recipes.config.traits import get_traits
from recipes.errors import ConfigError

_NODE = "callbacks.loss_spike"
_MEMINFO = Path("/proc/meminfo")
_BYTES_PER_PARAMETER = 12  # weights and Adam's moments in float32
_GIB = 2**30


def check_loss_spike(
    config: Mapping[str, Any], world_size: int, meminfo: Path = _MEMINFO
) -> Iterator[ConfigError]:
    """Warm-up and window, quarantine and ring, snapshots and memory."""
    rules = (config.get("callbacks") or {}).get("loss_spike")
    if rules is None:
        return
    window, warmup_steps = rules["window"], rules["warmup_steps"]
    if warmup_steps > window:
        yield ConfigError(
            f"{_NODE}.warmup_steps={warmup_steps}",
            f"the window of {_NODE}.window={window} never holds so many values: no spike would be seen",
            f"{_NODE}.window={warmup_steps}",
        )
    every, count = rules["snapshot_every"], rules["num_snapshots"]
    longest = every * (count - 1)
    if rules["quarantine_steps"] > longest > 0:
        yield ConfigError(
            f"{_NODE}.quarantine_steps={rules['quarantine_steps']}",
            f"{count} snapshots every {every} steps: each is overwritten after {count * every} steps, and the newest"
            " good one must outlive the next",
            f"{_NODE}.quarantine_steps={longest}",
        )
    if rules["snapshot_storage"] == "memory":
        yield from _memory(config, count, world_size, meminfo)


def _memory(
    config: Mapping[str, Any], count: int, world_size: int, meminfo: Path
) -> Iterator[ConfigError]:
    """Against all that the machine has: what is free now may be another run's, or be freed in a moment."""
    parameters = num_parameters_at_least(config["model"])
    if parameters is None or not meminfo.is_file():
        return
    nodes = config["trainer"]["num_nodes"]
    # whole on every rank of a node, or one model shared by all ranks
    copies = world_size / nodes if get_traits(config["strategy"]).replicates_state else 1 / nodes
    needed = parameters * _BYTES_PER_PARAMETER * count * copies
    has = int(meminfo.read_text().split("MemTotal:")[1].split()[0]) * 1024
    if needed > has:
        yield ConfigError(
            f"{_NODE}.snapshot_storage=memory",
            f"{count} snapshots take {needed / _GIB:.0f} GiB of host memory a node at least, this machine has"
            f" {has / _GIB:.0f}",
            f"{_NODE}.snapshot_storage=disk",
        )


def num_parameters_at_least(model: Mapping[str, Any]) -> int | None:
    """The matrices of a decoder, from its shape; None for another kind of model."""
    hidden_size, layers, vocab = (
        model.get(key) for key in ("hidden_size", "num_layers", "vocab_size")
    )
    if not (hidden_size and layers and vocab):
        return None
    heads, kv_heads = model.get("num_heads"), model.get("num_kv_heads")
    hidden = model.get("ffn_hidden_size")
    kv_share = kv_heads / heads if heads and kv_heads else 1
    attention = 2 * hidden_size * hidden_size * (1 + kv_share)
    feed_forward = 3 * hidden_size * hidden if hidden else 8 * hidden_size * hidden_size
    return int(vocab * hidden_size + layers * (attention + feed_forward))
