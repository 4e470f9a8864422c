"""Check that a loss or a task of one's own has the methods of its protocol, read from source."""

from collections.abc import Iterator, Mapping
from typing import Any

from recipes.config.signature import find_lineage, find_unwritten
from recipes.config.traits import select
from recipes.errors import ConfigError

_LOSS = "recipes.loss.Loss"
_TASK = "recipes.task.base.TrainingTask"
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")  # each defines every class separately
# section -> the class of Lightning that may be meant, and what takes an object of it
_OF_LIGHTNING = {
    "model": ("core.module.LightningModule", "task=lightning 'task.module={{_target_: {}, …}}'"),
    "task": ("core.module.LightningModule", "task=lightning 'task.module={{_target_: {}, …}}'"),
    "data": ("core.datamodule.LightningDataModule", "data=lightning 'data.module={{_target_: {}, …}}'"),
}


def check_classes_of_lightning(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Answer a LightningModule or LightningDataModule in the place of a class of ours with what trains it."""
    for section, (base, command) in _OF_LIGHTNING.items():
        target = str(select(config, f"{section}._target_"))
        lineage = set() if target.startswith("recipes.") else find_lineage(target) or set()
        if lineage & {f"{package}.{base}" for package in _PACKAGES} and _TASK not in lineage:
            reason = f"{target.rpartition('.')[2]} is a {base.rpartition('.')[2]}, which is trained as it is"
            yield ConfigError(f"{section}._target_={target}", reason, command.format(target))


def check_own_classes(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Name every method that the class of `loss` or `task` lacks; a function, or what cannot be read, is accepted."""
    for section in ("loss", "task"):
        target = str(select(config, f"{section}._target_"))
        lineage, name = find_lineage(target), target.rpartition(".")[2]
        if lineage is None:
            continue
        shown = f"{section}._target_={target}"
        if section == "loss" and _LOSS not in lineage:
            missing = ", ".join(f"{method}()" for method in find_unwritten(_LOSS))
            reason = f"{name} is no loss of sums and counts, which has the methods {missing}"
            fix = "loss=<an option of conf/loss/>, or a class of yours that is derived from recipes.loss.TargetLoss"
            yield ConfigError(shown, reason, fix)
        elif unwritten := find_unwritten(target):
            missing = " and no ".join(f"{method}()" for method in unwritten)
            fix = " and ".join(f"def {method}(self, …)" for method in unwritten)
            yield ConfigError(shown, f"{name} has no {missing}, which its base leaves to it", f"{fix} in that class")
