"""Read and write published weights."""

from collections.abc import Callable
from typing import Any

import torch

from recipes.model import Model


@torch.no_grad()
def initialize(model: Model, seed: int) -> None:
    """Give `model` its first weights: `model.pretrained` if it is set, else `init_weights(seed)`.

    Call after `to_empty`, on the device of the run, sharded or not. No collectives: every rank
    reads or draws the whole of one parameter at a time and keeps its own shard.

    Raises:
        ValueError: the weights named by `model.pretrained` do not fit the model; nothing was
            loaded.
    """
    pretrained: str | None = getattr(model, "pretrained", None)
    if pretrained is None:
        model.init_weights(seed)
        return
    # Imported here: only a run that starts from somebody's weights pays for safetensors.
    from recipes.model.weights import huggingface, torchvision

    load: dict[str, Callable[[Any, str], None]] = {
        "tokens": huggingface.load_pretrained,
        "images": torchvision.load_pretrained,
    }
    load[model.input_kind](model, pretrained)
