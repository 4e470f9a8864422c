"""A whole model on every rank; gradients are averaged once per optimizer step, while the backward pass runs."""

from collections.abc import Callable, Iterable, Sequence

import torch
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from recipes.collectives import sum_over_ranks
from recipes.gradients import clip_gradients
from recipes.precision import Precision
from recipes.precision_plugin import lightning_plugin, loss_scale_of, num_overflows_of


class DataParallel(DDPStrategy):
    """Lightning's DDP strategy, answering the questions of `recipes.strategy.Engine`.

    Gradients are views of the communication buckets and stay so, zeroed in place, which saves their copy, 4 bytes
    a parameter. Inside an accumulation window Lightning suppresses the all-reduce. A static graph is not asked
    for: it serves reentrant activation checkpoints and unused parameters, and there are neither here. Running
    statistics are not broadcast at every forward pass; the task averages them over ranks where they are read.

    Args:
        devices: Of this node, one a rank.
        precision: Of weights and products.
        checkpoint_io: How checkpoints are written and read.
    """

    grad_norm: Tensor | None = None
    frees_gradients = False

    def __init__(
        self,
        *,
        devices: Sequence[torch.device],
        precision: Precision,
        checkpoint_io: CheckpointIO | None = None,
    ) -> None:
        super().__init__(
            checkpoint_io=checkpoint_io,
            precision_plugin=lightning_plugin(precision, devices[0]),
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
        )

    def place(self, model: nn.Module, initialize: Callable[[nn.Module], None]) -> None:
        """Every rank holds the whole model; weights depend on seed and name, so that all hold the same."""
        model.to_empty(device=self.root_device)
        initialize(model)

    def own_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer as it is."""
        return optimizer

    def clip_gradients(
        self, parameters: Iterable[nn.Parameter], *, max_norm: float | None, max_value: float | None
    ) -> None:
        """Clip in place, where asked, and keep the norm before; the averaged gradients are whole on every rank."""
        self.grad_norm = clip_gradients(parameters, max_norm=max_norm, max_value=max_value)

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Add a tensor over all ranks."""
        return sum_over_ranks(value, self.root_device)

    @property
    def current_loss_scale(self) -> float | None:
        """What the loss is multiplied by; None without a loss scaler."""
        return loss_scale_of(self.precision_plugin)

    @property
    def num_overflows(self) -> int:
        """Optimizer steps skipped because a gradient was not finite."""
        return num_overflows_of(self.precision_plugin)
