"""Check callbacks: those of other packages, some of which control what settings do, and the settings of loss_spike."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recipes.config.resolved import ResolvedRun
from recipes.config.signature import find_lineage
from recipes.errors import ConfigError

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")  # each defines every class separately
# Lightning's callbacks that change what a setting controls -> why they cannot work here, and what to type instead
_REPLACED: dict[str, tuple[str, str]] = {
    "gradient_accumulation_scheduler.GradientAccumulationScheduler": (
        "it accumulates gradients beside the micro-batches of global_batch_size, so that loss and gradients are wrong",
        "micro_batch_size=<samples>",
    ),
    "stochastic_weight_avg.StochasticWeightAveraging": (
        "it replaces the schedule of the learning rate, and counts in epochs, which a stream has not",
        "ema_decay=0.999, and mode.weights=ema after the run",
    ),
    "weight_averaging.WeightAveraging": (
        "it keeps a second model that checkpoints, rollbacks and sharding do not know",
        "ema_decay=0.999, and mode.weights=ema after the run",
    ),
    "lr_finder.LearningRateFinder": (
        "it trains before the run and restores a checkpoint of Lightning's own format",
        "mode=lr_find",
    ),
    "batch_size_finder.BatchSizeFinder": (
        "it changes the batch size of a data loader, and global_batch_size defines the experiment",
        "mode=batch_find",
    ),
    "checkpoint.Checkpoint": (
        "it saves beside checkpoint=, in a form that neither resume= nor a rollback reads",
        "save_every=auto or <optimizer steps>, with checkpoint.keep_best=1 for the best of checkpoint.monitor",
    ),
    "finetuning.BaseFinetuning": (
        "it adds parameters to the optimizer during the run, which schedule and checkpoints do not follow",
        "freeze=… or adapter=lora for a part of the weights; of a LightningModule requires_grad in a hook of its own",
    ),
    "pruning.ModelPruning": (
        "it replaces weights by masked ones, under other names than those of the checkpoints",
        "mode=export, and pruning of what it writes",
    ),
    "spike.SpikeDetection": (
        "it ends the run at a spike, and the stream does not read the batches that it writes down to be skipped",
        "callbacks=default, whose loss_spike detects a spike and rolls back",
    ),
}
_CALLBACK, _BAR = "callback.Callback", "progress.progress_bar.ProgressBar"


def check_callbacks(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Check the class of each callback, subclasses included; one whose source cannot be read is accepted."""
    bars = []
    for name, node in (config.get("callbacks") or {}).items():
        target = node.get("_target_") if isinstance(node, Mapping) else None
        lineage = find_lineage(target) if isinstance(target, str) else None
        if lineage is None:
            continue
        names = {path.partition(".callbacks.")[2] for path in lineage if path.startswith(_PACKAGES)}
        where = f"callbacks.{name}._target_={target}"
        if _CALLBACK not in names:
            yield ConfigError(where, "it is a class, but not a subclass of Lightning's Callback", _without(name))
        for replaced in sorted(names & _REPLACED.keys()):
            reason, instead = _REPLACED[replaced]
            yield ConfigError(where, reason, f"{instead}; and the same command without callbacks.{name}")
        if _BAR in names:
            bars.append((name, where))
    if len(bars) > 1:  # Lightning rejects a second one, whichever it is
        first, (_, second) = bars[0][0], bars[1]
        yield ConfigError(second, f"callbacks.{first} is a progress bar, and a run has one", f"'~callbacks.{first}'")


def _without(name: str) -> str:
    return f"the same command without callbacks.{name}"


# Check settings of `callbacks.loss_spike` for contradictions, and against this machine's memory.

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
