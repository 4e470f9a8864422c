"""Whether the checkpoint of a resumed run fits this run: its model, its optimizer, its micro-batches."""

from collections.abc import Mapping
from typing import Any

import torch

from recipes.checkpoint.saved_tensor import SavedTensor
from recipes.errors import ConfigError


def check_model(own: Mapping[str, torch.Size], saved: Mapping[str, SavedTensor]) -> None:
    """Compare the shapes of a model's tensors with the tensors of a checkpoint.

    Raises:
        ConfigError: A tensor is missing, unknown, or has another shape.
    """
    own_shapes = {name: tuple(shape) for name, shape in own.items()}
    saved_shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    for name in own_shapes | saved_shapes:
        if own_shapes.get(name) != saved_shapes.get(name):
            raise ConfigError(
                "resume=… model.…",
                f"the checkpoint is of another model: {name} is {_show(saved_shapes.get(name))} there"
                f" and {_show(own_shapes.get(name))} here",
                "resume=… without settings of the model",
            )


def check_base(own: str | None, saved: str | None) -> None:
    """Compare the weights beside an adapter with those that it was trained beside.

    Raises:
        ConfigError: They are others.
    """
    if own != saved:
        raise ConfigError(
            "resume=… model.…",
            f"the checkpoint is of an adapter beside the weights of {saved}, and here are those of {own}",
            "resume=… without settings of the model, its weights and the seed",
        )


def _show(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))


def check_optimizer(name: str, saved_name: str | None) -> None:
    """Compare the optimizer of this run with that of a checkpoint: another optimizer cannot use its state.

    Args:
        name: Class of the optimizer of this run.
        saved_name: Class of the optimizer of the checkpoint; None without a checkpoint.

    Raises:
        ConfigError: They differ.
    """
    if saved_name not in (None, name):
        raise ConfigError(
            f"optimizer={name.lower()}",
            f"the checkpoint holds the state of {saved_name}",
            f"optimizer={str(saved_name).lower()}, or leave it out",
        )


def recount_micro_batches(checkpoint: dict[str, Any], num_micro_batches: int) -> None:
    """Rewrite Lightning's counters of micro-batches for a run with another number of them per step.

    Args:
        checkpoint: Lightning's, changed in place.
        num_micro_batches: Micro-batches per optimizer step of this run.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    done = checkpoint["global_step"] * num_micro_batches
    for counts in (progress["total"], progress["current"]):
        # 1 if the checkpoint was written before its micro-batch was counted as completed, else 0
        uncounted = counts["ready"] - counts["completed"]
        counts |= dict.fromkeys(counts, done) | {"completed": done - uncounted}
