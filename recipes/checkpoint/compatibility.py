"""What a resumed run may differ in from the run that wrote the checkpoint. Compares names and shapes."""

from collections.abc import Mapping
from typing import Any

import torch

from recipes.checkpoint.saved_tensors import SavedTensor
from recipes.mistake import Mistake


def refuse_other_model(own: Mapping[str, torch.Size], saved: Mapping[str, SavedTensor]) -> None:
    """Compare the shapes of a model's tensors with the tensors of a checkpoint.

    Raises:
        Mistake: One is missing, one too many, or one has another shape.
    """
    here = {name: tuple(shape) for name, shape in own.items()}
    there = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    for name in here | there:
        if here.get(name) != there.get(name):
            raise Mistake(
                "resume=… model.…",
                f"the checkpoint is of another model: {name} is {_shape(there.get(name))} there"
                f" and {_shape(here.get(name))} here",
                "resume=… without settings of the model",
            )


def refuse_other_optimizer(name: str, saved_name: str | None) -> None:
    """Moments of one optimizer mean nothing to another.

    Args:
        name: Class of the optimizer of this run.
        saved_name: That of the checkpoint; None where there is none.

    Raises:
        Mistake: They differ.
    """
    if saved_name not in (None, name):
        raise Mistake(
            f"optimizer={name.lower()}",
            f"the checkpoint holds the state of {saved_name}",
            f"optimizer={str(saved_name).lower()}, or leave it out",
        )


def recount_micro_batches(checkpoint: dict[str, Any], *, passes: int) -> None:
    """Rewrite Lightning's counters, in micro-batches, for a run with another number of them per step.

    Args:
        checkpoint: Lightning's, changed in place.
        passes: Micro-batches per optimizer step of this run.
    """
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    done = checkpoint["global_step"] * passes
    for counts in (progress["total"], progress["current"]):
        # 1 in a checkpoint written before its batch was counted as completed, else 0
        uncounted = counts["ready"] - counts["completed"]
        counts |= dict.fromkeys(counts, done) | {"completed": done - uncounted}


def _shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))
