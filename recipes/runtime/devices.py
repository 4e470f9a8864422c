"""Devices of this node, one per rank."""

from collections.abc import Mapping
from typing import Any

import torch

from recipes.errors import ConfigError
from recipes.runtime.world import Ranks, has_own_gpu


def get_devices(trainer: Mapping[str, Any], ranks: Ranks) -> list[torch.device]:
    """Return one device per rank of this node: the GPUs listed in `trainer.devices`, the first N, or the CPU."""
    accelerator, requested = trainer["accelerator"], trainer["devices"]
    has_gpu = torch.cuda.is_available()
    if accelerator in ("gpu", "cuda") and not has_gpu:
        raise ConfigError(
            f"trainer.accelerator={accelerator}",
            "torch sees no GPU on this machine",
            "trainer.accelerator=auto",
        )
    if not has_gpu or accelerator == "cpu":
        return [torch.device("cpu")] * ranks.per_node
    if ranks.per_node > torch.cuda.device_count() == 1 and has_own_gpu():
        return [torch.device("cuda", 0)] * ranks.per_node
    indices = requested if isinstance(requested, list) else range(ranks.per_node)
    return [torch.device("cuda", index) for index in indices][: ranks.per_node]
