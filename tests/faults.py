"""Inject a fault into a run at a given step: in batch, forward pass, learning rate or weights, under any engine."""

from typing import Any, Literal

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

Fault = Literal["labels", "inputs", "nan_batch", "inf_gradient", "rate_jump", "weight", "slow"]
FAULTS: tuple[Fault, ...] = (
    "labels",
    "inputs",
    "nan_batch",
    "inf_gradient",
    "rate_jump",
    "weight",
    "slow",
)


class FaultAt(Callback):
    """Injects one fault, once: a step repeated after a rollback runs without it.

    Args:
        kind: `labels`: the targets of a batch are random. `inputs`: its activations are 1000 times too large.
            `nan_batch`: its loss is NaN. `inf_gradient`: one rank's gradient is infinite, its loss is not.
            `rate_jump`: the learning rate is `size` times too large for 20 steps. `weight`: some values of a weight
            are corrupted, as by a flipped exponent bit. `slow`: the learning rate grows by 3 % per step until it is
            `size` times too large, and stays there until the run rolls back.
        step: Number of optimizer steps before the fault.
        rank: Rank with the fault, for `inf_gradient`.
        size: Factor applied to the learning rate.

    Attributes:
        num_damaged: Number of steps with the fault so far.
    """

    def __init__(self, *, kind: Fault, step: int, rank: int = 0, size: float = 100.0) -> None:
        self.kind = kind
        self.step = step
        self.rank = rank
        self.size = size
        self.num_damaged = 0
        self._last_step = -1
        self._handle: Any = None

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._end()
        step = trainer.global_step
        if step == self._last_step:
            return  # another micro-batch of the same step
        lasts = {"rate_jump": 20, "slow": 10**9}.get(self.kind, 1)
        continues = self.num_damaged and step == self._last_step + 1
        self._last_step = step
        begins = step == self.step and not self.num_damaged
        if not (continues or begins) or self.num_damaged == lasts:
            self._last_step = -1  # the fault is over, or the run has rolled back
            return
        self.num_damaged += 1
        getattr(self, f"_{self.kind}")(trainer, pl_module, batch)

    def _end(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _labels(self, trainer: lightning.Trainer, pl_module: Any, batch: Any) -> None:
        targets = batch["targets"]
        generator = torch.Generator().manual_seed(self.step)
        high = int(targets.max()) + 1
        batch["targets"] = torch.randint(high, targets.shape, generator=generator).to(targets)

    def _inputs(self, trainer: lightning.Trainer, pl_module: Any, batch: Any) -> None:
        def enlarge(module: Any, args: Any) -> Any:
            return args[0] * 1000, *args[1:]

        self._handle = pl_module.model.head.register_forward_pre_hook(enlarge)

    def _nan_batch(self, trainer: lightning.Trainer, pl_module: Any, batch: Any) -> None:
        batch["num_targets"] = batch["num_targets"] * torch.tensor(torch.nan)

    def _inf_gradient(self, trainer: lightning.Trainer, pl_module: Any, batch: Any) -> None:
        def blow_up(gradient: Tensor) -> Tensor:
            return gradient * torch.inf

        def hook(module: Any, args: Any) -> None:
            if args[0].requires_grad:  # skip the forward pass of a debug dump
                args[0].register_hook(blow_up)

        if trainer.global_rank == self.rank:
            self._handle = pl_module.model.head.register_forward_pre_hook(hook)

    def _rate_jump(self, trainer: lightning.Trainer, pl_module: Any, batch: Any) -> None:
        _scale_rates(trainer, self.size)

    def _slow(self, trainer: lightning.Trainer, pl_module: Any, batch: Any) -> None:
        _scale_rates(trainer, min(1.03**self.num_damaged, self.size))

    def _weight(self, trainer: lightning.Trainer, pl_module: Any, batch: Any) -> None:
        """Corrupt the optimizer's own copy: ZeRO overwrites the compute weights from its master weights."""
        if hasattr(trainer.strategy, "live_tensors"):
            for name, tensor in trainer.strategy.live_tensors(writes_back=True):
                if name == "master/0":
                    _damage(tensor)
            return
        named = pl_module.named_parameters()
        matrices = [weight for name, weight in named if "blocks" in name and weight.ndim > 1]
        weight: Any = matrices[-1].detach()
        _damage(weight.to_local() if hasattr(weight, "to_local") else weight)


def _damage(tensor: Tensor) -> None:
    tensor.view(-1)[: max(1, tensor.numel() // 1000)] = 1e4


def _scale_rates(trainer: lightning.Trainer, factor: float) -> None:
    """Scale the learning rates for one step, after which the scheduler sets them again."""
    for group in trainer.optimizers[0].param_groups:
        group["lr"] *= factor
