"""The answers of every engine whose gradients torch itself can reach: one device, DDP, FSDP2."""

from collections.abc import Callable, Iterable

import torch
from lightning.pytorch.plugins import Precision as Plugin
from torch import Tensor, nn

from recipes.clipping import Clipping
from recipes.numerics.collectives import sum_over_ranks
from recipes.numerics.gradients import clip_gradients
from recipes.strategy import StepGuard, skip_step
from recipes.strategy.precision_plugin import get_loss_scale, get_num_overflows


class TorchNativeMixin:
    """Goes before Lightning's strategy among the bases of ours; see `recipes.strategy.Engine`.

    Attributes:
        grad_norm: Global L2 norm before clipping of the last optimizer step; None before it.
        clip_threshold: What gradients of that step were scaled down to where they were above; inf: nothing.
        guard: Refuses steps; None: every step is made.
        clipping: A limit of the norm beside the fixed one; None: there is none.
        frees_gradients: Whether gradients are freed after the step; False: zeroed where they lie.
    """

    grad_norm: Tensor | None = None
    clip_threshold: Tensor | None = None
    guard: StepGuard | None = None
    clipping: Clipping | None = None
    optimizers: list[torch.optim.Optimizer]
    frees_gradients = True
    precision_plugin: Plugin
    root_device: torch.device

    def place(self, model: nn.Module, initialize: Callable[[nn.Module], None]) -> None:
        """The device holds the whole model; weights depend on seed and name, so that every rank has the same."""
        model.to_empty(device=self.root_device)
        initialize(model)

    def own_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer as it is."""
        return optimizer

    def clip_gradients(
        self, parameters: Iterable[nn.Parameter], *, max_norm: float | None, max_value: float | None
    ) -> None:
        """Clip in place, where asked, and keep the norm over all ranks' shards before; refuse the step if need be."""
        parameters = list(parameters)
        norm, self.clip_threshold = clip_gradients(
            parameters, max_norm=max_norm, max_value=max_value, clipping=self.clipping
        )
        self.grad_norm = norm
        if self.guard is not None:
            skip_step(self.optimizers[0], parameters, self.guard.judge(norm))

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Add a tensor over all ranks."""
        return sum_over_ranks(value, self.root_device)

    @property
    def current_loss_scale(self) -> float | None:
        """What the loss is multiplied by; None without a loss scaler."""
        return get_loss_scale(self.precision_plugin)

    @property
    def num_overflows(self) -> int:
        """Optimizer steps skipped because a gradient was not finite."""
        return get_num_overflows(self.precision_plugin)
