"""Initial weights of a model: drawn from the seed, or loaded from published files."""

from collections.abc import Callable
from typing import Any

import torch

from recipes.model import Model


@torch.no_grad()
def initialize(model: Model, seed: int) -> None:
    """Set the initial weights of `model`: `model.pretrained` if it is set, else `init_weights(seed)`.

    Call after `to_empty`, on the device of the run, sharded or not. No collectives: every rank reads or draws one
    unsharded parameter at a time and keeps its own shard.

    Args:
        model: Has storage, with undefined values.
        seed: Of the run.

    Raises:
        ValueError: The weights named by `model.pretrained` do not fit the model; nothing was loaded.
    """
    pretrained: str | None = getattr(model, "pretrained", None)
    if pretrained is None:
        model.init_weights(seed)
        return
    # imported here, so that only a run that loads published weights pays for the import of safetensors
    from recipes.model.weights import huggingface, torchvision

    load: dict[str, Callable[[Any, str], None]] = {
        "tokens": huggingface.load_pretrained,
        "images": torchvision.load_pretrained,
    }
    load[model.input_kind](model, pretrained)
