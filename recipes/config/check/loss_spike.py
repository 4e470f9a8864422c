"""Check settings of `callbacks.loss_spike` for contradictions, and against this machine's memory."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recipes.config.resolved import ResolvedRun
from recipes.errors import ConfigError

_NODE = "callbacks.loss_spike"
_READ = {"window", "warmup_steps", "snapshot_every", "num_snapshots", "quarantine_steps", "snapshot_storage"}
_MEMINFO = Path("/proc/meminfo")
_BYTES_PER_PARAMETER = 12  # weights and two optimizer states, float32
_GIB = 2**30


def check_loss_spike(run: ResolvedRun, *, world_size: int, meminfo: Path = _MEMINFO) -> Iterator[ConfigError]:
    """Check warmup against window, quarantine against snapshots, snapshots against memory."""
    node = (run.config.get("callbacks") or {}).get("loss_spike")
    if node is None or not node.keys() >= _READ:  # a deleted one has the default of its signature
        return
    window, warmup_steps = node["window"], node["warmup_steps"]
    if warmup_steps > window:
        yield ConfigError(
            f"{_NODE}.warmup_steps={warmup_steps}",
            f"the window of {_NODE}.window={window} never holds that many values, so no spike would be detected",
            f"{_NODE}.window={warmup_steps}",
        )
    every, count = node["snapshot_every"], node["num_snapshots"]
    longest = every * (count - 1)
    if node["quarantine_steps"] > longest > 0:
        yield ConfigError(
            f"{_NODE}.quarantine_steps={node['quarantine_steps']}",
            f"{count} snapshots, one every {'step' if every == 1 else f'{every} steps'}: each is overwritten after"
            f" {count * every} steps, and the newest good one must outlive the next",
            f"{_NODE}.quarantine_steps={longest}",
        )
    if node["snapshot_storage"] == "memory":
        yield from _check_memory(run, count, world_size, meminfo)


def _check_memory(run: ResolvedRun, count: int, world_size: int, meminfo: Path) -> Iterator[ConfigError]:
    """Compare with the total memory of the machine: free memory may be different when the run starts."""
    parameters = num_parameters_at_least(run.config["model"])
    if parameters is None or not meminfo.is_file():
        return
    # a copy on every rank of a node, or a single copy sharded over all ranks
    copies = (world_size if run.strategy.replicates_state else 1) / run.num_nodes
    needed = parameters * _BYTES_PER_PARAMETER * count * copies
    available = int(meminfo.read_text(encoding="utf-8").split("MemTotal:")[1].split()[0]) * 1024
    if needed > available:
        yield ConfigError(
            f"{_NODE}.snapshot_storage=memory",
            f"{count} snapshots take at least {needed / _GIB:.0f} GiB of host memory per node; this machine has"
            f" {available / _GIB:.0f}",
            f"{_NODE}.snapshot_storage=disk",
        )


def num_parameters_at_least(model: Mapping[str, Any]) -> int | None:
    """Return a lower bound on a decoder's parameters from its matrix shapes; None for any other model."""
    hidden_size, layers, vocab = (model.get(key) for key in ("hidden_size", "num_layers", "vocab_size"))
    if not (hidden_size and layers and vocab):
        return None
    heads, kv_heads = model.get("num_heads"), model.get("num_kv_heads")
    ffn_hidden_size = model.get("moe_intermediate_size") or model.get("ffn_hidden_size")  # an expert at least
    kv_fraction = kv_heads / heads if heads and kv_heads else 1
    attention = 2 * hidden_size * hidden_size * (1 + kv_fraction)
    gated, plain = 3 * hidden_size * (ffn_hidden_size or 0), 8 * hidden_size * hidden_size
    feed_forward = gated or plain
    return int(vocab * hidden_size + layers * (attention + feed_forward))
