"""Bytes that a rank holds in weights, gradients and optimizer state, counted tensor by tensor, and what theory says."""

import gc
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor


def held_bytes(module: torch.nn.Module) -> int:
    """Storage behind every live tensor of this process, each storage once, gradients included."""
    tensors = [item for item in gc.get_objects() if isinstance(item, Tensor)]
    tensors += [weight.grad for weight in module.parameters() if weight.grad is not None]
    tensors = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    storages = {}
    for tensor in tensors:
        if type(tensor).__name__ != "FakeTensor" and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class HeldBytes(Callback):
    """Counts where all three kinds are alive: before the second optimizer step, and after it."""

    def __init__(self) -> None:
        self.most = 0

    def setup(self, trainer: lightning.Trainer, pl_module: Any, stage: str) -> None:
        self._before = held_bytes(pl_module)

    def on_before_optimizer_step(
        self, trainer: lightning.Trainer, pl_module: Any, optimizer: Any
    ) -> None:
        self._count(trainer, pl_module)

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: Any, *_: Any) -> None:
        self._count(trainer, pl_module)

    def _count(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        if trainer.global_step >= 1:
            self.most = max(self.most, held_bytes(pl_module) - self._before)


def bytes_per_parameter(strategy: str, num_ranks: int) -> float:
    """Float32 weights 4, gradients 4, Adam's moments 8; DeepSpeed keeps a master copy of the weights beside them, 4."""
    return {
        "single": 16.0,
        "ddp": 16.0,
        "fsdp": 16 / num_ranks,
        "hsdp": 16 / 2,  # shards of two ranks
        "ZeRO-1": 4 + 4 + 12 / num_ranks,
        "ZeRO-2": 4 + 16 / num_ranks,
        "ZeRO-3": 20 / num_ranks,
    }[strategy]
