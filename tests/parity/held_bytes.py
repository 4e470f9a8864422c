"""Bytes of weights, gradients and optimizer state on a rank: counted per storage, and in theory."""

import gc
import time
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor


def held_bytes(module: torch.nn.Module) -> int:
    """Return the bytes of all live tensor storages in this process, including gradients; each storage counts once."""
    gc.collect()  # unreferenced tensors are garbage, not state, whenever they would have been collected
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
    """Counts bytes while weights, gradients and optimizer state all exist: before and after the second step."""

    def __init__(self) -> None:
        self.most = 0

    def setup(self, trainer: lightning.Trainer, pl_module: Any, stage: str) -> None:
        self._before = held_bytes(pl_module)

    def on_before_optimizer_step(self, trainer: lightning.Trainer, pl_module: Any, optimizer: Any) -> None:
        self._count(trainer, pl_module)

    def on_train_batch_end(self, trainer: lightning.Trainer, pl_module: Any, *_: Any) -> None:
        self._count(trainer, pl_module)

    def _count(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        if trainer.global_step >= 1:
            self.most = max(self.most, min(self._moments(pl_module)) - self._before)

    @staticmethod
    def _moments(module: torch.nn.Module) -> list[int]:
        """Count until 0.2 s free nothing: gloo's thread lets go of a reduced bucket after its rank has gone on."""
        counts = [held_bytes(module)]
        while len(counts) == 1 or counts[-1] < counts[-2]:
            time.sleep(0.2)
            counts.append(held_bytes(module))
        return counts


def bytes_per_parameter(strategy: str, num_ranks: int) -> float:
    """Return theoretical bytes per parameter: float32 weights 4, gradients 4, Adam state 8, DeepSpeed's master 4."""
    return {
        "single": 16.0,
        "ddp": 16.0,
        "fsdp": 16 / num_ranks,
        "hsdp": 16 / 2,  # sharded over two ranks
        "ZeRO-1": 4 + 4 + 12 / num_ranks,
        "ZeRO-2": 4 + 16 / num_ranks,
        "ZeRO-3": 20 / num_ranks,
    }[strategy]
