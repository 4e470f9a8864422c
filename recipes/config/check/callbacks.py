"""Check callbacks of other packages: some change what the settings of a run control, and some are no callbacks."""

from collections.abc import Iterator, Mapping
from typing import Any

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
        "save_every=<optimizer steps>, with checkpoint.keep_best=1 for the best of checkpoint.monitor",
    ),
    "finetuning.BaseFinetuning": (
        "it adds parameters to the optimizer during the run, which schedule and checkpoints do not follow",
        "adapter=lora, which trains a part of the weights",
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
