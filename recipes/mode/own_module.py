"""Evaluate, test and predict with a LightningModule of one's own, by the steps and the loaders that it has for them.

And `release` it from the run that has adopted it.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from typing_extensions import override

from recipes.build import Run
from recipes.data.datamodule import StreamDataModule
from recipes.errors import ConfigError
from recipes.lightning_internals import forget_arguments, get_callbacks, restore_within
from recipes.mode.load import require_checkpoint, restoring
from recipes.mode.start import get_checkpoint_io
from recipes.task.own_module import Adopted

Columns = dict[str, list[Any]]


def measure(run: Run, split: str) -> tuple[dict[str, float], Path]:
    """Return what the module logs over a split, under its own names, and the checkpoint that was loaded.

    Args:
        run: A run with a checkpoint and a LightningModule of one's own.
        split: `val`, by `validation_step`, or `test`, by `test_step`.

    Raises:
        ConfigError: There is no checkpoint, the module has no such step, or nothing has loaders of the split.
    """
    call, step = ("validate", "validation_step") if split == "val" else ("test", "test_step")
    if not is_overridden(step, run.task, lightning.LightningModule):
        name = type(run.task).__name__
        mode = "evaluate" if split == "val" else "test"
        raise ConfigError(f"mode={mode}", f"{name} has no {step}", f"a {step} in {name}")
    loaders = _find_loaders(run, split)
    by_loader = _run(run, call, verbose=False, **loaders)
    return {name: value for metrics in by_loader for name, value in metrics.items()}, _find_loaded(run)


def predict(run: Run, split: str | None, write: Callable[[Columns], None]) -> tuple[str, Path]:
    """Pass what `predict_step` returns for each batch to `write`.

    Args:
        run: A run with a checkpoint and a LightningModule of one's own.
        split: `val`, `test` or `train`; None: the `predict_dataloader` if there is one, else `val`.
        write: Takes columns of one length, by name.

    Returns:
        The split, and the checkpoint that was loaded.

    Raises:
        ConfigError: There is no checkpoint, nothing has loaders of the split, or there is no row per sample.
    """
    split = split or ("predict" if _has_loader(_get_owner(run), "predict") else "val")
    loaders = _find_loaders(run, split)
    if not isinstance(run.data, StreamDataModule):
        owner = _get_owner(run)
        of_user: Any = type(owner)
        members = {"__module__": of_user.__module__, "recipes_split": split}
        owner.__class__ = type(of_user.__name__, (_Predicted, of_user), members)
    get_callbacks(run.trainer).append(_Predictions(write))
    _run(run, "predict", return_predictions=False, **loaders)
    return split, _find_loaded(run)


def release(task: Any) -> lightning.LightningModule:
    """Return a module without anything of the run that has adopted it: an object of its own class, with no Trainer."""
    task.trainer = None
    while isinstance(task, Adopted):
        task.__class__ = type(task).__bases__[-1]  # towards that of its author, see `OwnModule.adopt`
    for name in Adopted.__annotations__:
        vars(task).pop(name, None)
    module: lightning.LightningModule = task
    return module


class _Predicted:
    """The first base of an owner of loaders, one of whose splits is predicted."""

    recipes_split: str

    def setup(self, stage: str) -> None:
        super().setup({"val": "validate"}.get(self.recipes_split, self.recipes_split))  # type: ignore[misc]

    def predict_dataloader(self) -> Any:
        loaders = getattr(super(), f"{self.recipes_split}_dataloader")()
        forget_arguments(loaders)
        return loaders


class _Predictions(Callback):
    """Passes on what is predicted for each batch."""

    def __init__(self, write: Callable[[Columns], None]) -> None:
        self._write = write

    @override
    def on_predict_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, *_: Any, **__: Any
    ) -> None:
        columns = dict(_list_columns("prediction", outputs))
        if len({len(values) for values in columns.values()}) != 1:
            found = ", ".join(f"{name}: {len(values)}" for name, values in columns.items()) or type(outputs).__name__
            raise ConfigError(
                "mode=predict",
                f"what predict_step returns has no row per sample ({found})",
                "return a tensor [B, …], or a tuple or dict of such tensors and of lists of B values",
            )
        self._write(columns)


def _list_columns(name: str, outputs: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield a column for each tensor [B, …] and each list of plain values in what a step returns."""
    if isinstance(outputs, Tensor):
        if outputs.ndim:
            yield name, outputs.detach().cpu().tolist()
    elif isinstance(outputs, Mapping):
        for key, value in outputs.items():
            yield from _list_columns(str(key), value)
    elif isinstance(outputs, Sequence) and not isinstance(outputs, str):
        if all(isinstance(value, str | int | float) for value in outputs):
            yield name, list(outputs)
        else:
            for place, value in enumerate(outputs):
                yield from _list_columns(f"{name}_{place}", value)


def _get_owner(run: Run) -> Any:
    """Return what has the loaders: the data module, or the module itself."""
    return run.task if run.data is None else run.data


def _has_loader(owner: Any, split: str) -> bool:
    """Return whether somebody's class has a loader of a split, which Lightning's own classes only declare."""
    parents = (lightning.LightningModule, lightning.LightningDataModule)
    parent: Any = next((parent for parent in parents if isinstance(owner, parent)), None)
    return parent is not None and is_overridden(f"{split}_dataloader", owner, parent)


def _find_loaders(run: Run, split: str) -> dict[str, Any]:
    """Return the arguments of the Trainer that say what it goes over."""
    if isinstance(run.data, StreamDataModule):
        run.data.trainer = run.trainer
        run.data.prepare_split(split)
        return {"dataloaders": run.data.split_dataloaders(split)}
    owner = _get_owner(run)
    if split == "train":
        reason = "a training loader of one's own may shuffle and have no end"
        raise ConfigError("mode.split=train", reason, "mode.split=val, or a predict_dataloader with these samples")
    if not _has_loader(owner, split):
        name, loader = type(owner).__name__, f"{split}_dataloader"
        raise ConfigError(f"the {split} split", f"{name} has no {loader}", f"a {loader} in {name}")
    return {"datamodule": run.data}


def _run(run: Run, call: str, **arguments: Any) -> Any:
    """Call a method of the Trainer with the weights of the checkpoint."""
    checkpoint = require_checkpoint(run)
    restore_within(run.trainer, lambda: restoring(run))
    # those of the run that trained: they have nothing to do here
    warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`, callbacks")
    return getattr(run.trainer, call)(run.task, ckpt_path=checkpoint, weights_only=True, **arguments)


def _find_loaded(run: Run) -> Path:
    loaded = get_checkpoint_io(run).loaded  # may be an older one: damaged checkpoints are skipped
    assert loaded is not None, "it has just been loaded"
    return loaded
