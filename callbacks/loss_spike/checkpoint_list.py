"""Remove checkpoints of rolled-back steps from the list of Lightning's ModelCheckpoint."""

import copy
import logging
from typing import Any

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Trainer
from torch import Tensor

from ..lightning_internals import allow_saves_after
from ..lightning_packages import find_classes

log = logging.getLogger("lightning_recipes")


def checkpoint_lists(trainer: Trainer) -> list[dict[str, Any]]:
    """Return a copy of every ModelCheckpoint's state: best scores, paths, latest checkpoint."""
    return [copy.deepcopy(saver.state_dict()) for saver in _find_savers(trainer)]


def restore_checkpoint_lists(trainer: Trainer, lists: list[dict[str, Any]]) -> None:
    """Restore the lists of a snapshot, without files that have been replaced since.

    Files of rolled-back steps stay on disk and are named in a log line: nothing is deleted, but `best_model_path` and
    `last_model_path` no longer refer to them.

    Args:
        trainer: The trainer, with `global_step` already restored.
        lists: Return value of `checkpoint_lists` at the time of the snapshot.
    """
    for saver, before in zip(_find_savers(trainer), lists, strict=True):
        allow_saves_after(saver, trainer.global_step)
        left = sorted(_paths(saver.state_dict()) - _paths(before))
        missing = trainer.strategy.broadcast(sorted(path for path in _paths(before) if not _exists(path)))
        saver.load_state_dict(_without(before, missing, lowest_is_best=saver.mode == "min"))
        saver.current_score = before["current_score"]
        if left and trainer.is_global_zero:
            log.warning(f"No longer in the list of ModelCheckpoint, as their steps were rolled back: {', '.join(left)}")


def _find_savers(trainer: Trainer) -> list[Any]:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, find_classes("callbacks.ModelCheckpoint"))]


def _paths(state: dict[str, Any]) -> set[str]:
    return {path for path in (*state["best_k_models"], state["best_model_path"], state["last_model_path"]) if path}


def _exists(path: str) -> bool:
    exists: bool = get_filesystem(path).exists(path)
    return exists


def _without(state: dict[str, Any], missing: list[str], *, lowest_is_best: bool) -> dict[str, Any]:
    """Return the state without missing files; replace best and worst by those of the remaining files."""
    if not missing:
        return state
    models: dict[str, Tensor] = {path: score for path, score in state["best_k_models"].items() if path not in missing}
    ranked = sorted(models, key=lambda path: float(models[path]), reverse=not lowest_is_best)
    best, worst = (ranked[0], ranked[-1]) if ranked else ("", "")
    return state | {
        "best_k_models": models,
        "best_model_path": best if state["best_model_path"] in missing else state["best_model_path"],
        "best_model_score": models.get(best) if state["best_model_path"] in missing else state["best_model_score"],
        "kth_best_model_path": worst,
        "kth_value": models.get(worst, state["kth_value"]),
        "last_model_path": "" if state["last_model_path"] in missing else state["last_model_path"],
    }
