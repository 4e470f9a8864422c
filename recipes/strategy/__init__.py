"""Strategies: small subclasses of Lightning's strategies that implement `Engine`."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipes.blocks import list_blocks, named_blocks
from recipes.clipping import Clipping
from recipes.errors import ConfigError
from recipes.lightning_internals import unwrap_optimizer
from recipes.mesh import Mesh
from recipes.parallel.groups import Groups


class StepGuard(Protocol):
    """Decides before each optimizer step whether to skip it; implemented by the loss spike callback.

    Attributes:
        loss: Loss of the current step over all ranks, a 0-dim tensor; set before the backward pass ends.
    """

    loss: Tensor | None

    def judge(self, norm: Tensor) -> Tensor:
        """Return whether to skip the step, a 0-dim bool tensor; called on every rank.

        Args:
            norm: Global gradient norm before clipping, a 0-dim tensor.
        """


class Engine(Protocol):
    """Interface of a strategy to tasks and modes, which never depend on a particular strategy.

    Attributes:
        grad_norm: Global L2 norm before clipping at the last optimizer step, a 0-dim tensor; None before the first.
        clip_threshold: Norm limit applied at that step, a 0-dim tensor; inf without a limit.
        guard: Skips optimizer steps; None executes every step. Set through the task, by the callback that watches them
            (`callbacks/loss_spike/reader.py`).
        clipping: Adaptive norm limit in addition to the fixed one; None disables it.
        current_loss_scale: Loss scale, read from the device; None without a loss scaler.
        num_overflows: Optimizer steps that this process skipped because a gradient was not finite.
        mesh: Sizes of the device mesh.
        groups: The process groups that this rank is in.
        data_rank: Data-parallel rank, below `data_size`.
        data_size: Number of ranks, or groups of ranks, with different samples.
        frees_gradients: Whether gradients are freed after the step; False zeroes them in place.
    """

    grad_norm: Tensor | None
    clip_threshold: Tensor | None
    guard: StepGuard | None
    clipping: Clipping | None
    frees_gradients: bool
    data_size: int

    @property
    def root_device(self) -> torch.device: ...

    @property
    def mesh(self) -> Mesh: ...

    @property
    def groups(self) -> Groups: ...

    @property
    def data_rank(self) -> int: ...

    @property
    def current_loss_scale(self) -> float | None: ...

    @property
    def num_overflows(self) -> int: ...

    def materialize(
        self, model: nn.Module, initialize: Callable[[nn.Module], None], *, is_trained: bool = True
    ) -> nn.Module:
        """Distribute a model from the meta device, and give it storage and initial weights.

        Returns the model, or this rank's pipeline stage: the same names, fewer layers.

        Args:
            model: On the meta device.
            initialize: Sets every parameter and buffer of a model that has storage; no collectives.
            is_trained: False for a frozen model beside the trained one, whose forward pass alone is run.
        """

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer to step: the same one, or an equivalent implementation."""

    def clip_gradients(
        self, parameters: Iterable[nn.Parameter], *, max_norm: float | None, max_value: float | None
    ) -> None:
        """Clip in place before the optimizer steps; None disables a limit. `grad_norm` is available after the step."""

    def scale_loss(self, value: Tensor) -> Tensor:
        """Return a tensor times the current loss scale; unchanged without a loss scaler."""

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks; with several ranks the result is on the communication device."""

    def sum_over_data_ranks(self, value: Tensor) -> Tensor:
        """Return the sum of a per-sample quantity over the data-parallel ranks."""

    def sum_over_token_ranks(self, value: Tensor) -> Tensor:
        """Return the sum of a per-token quantity, such as a loss, over the ranks with different tokens."""

    def gather_for_generation(self) -> AbstractContextManager[bool]:
        """Prepare the weights for text generation; yield whether a forward pass then needs no other rank."""

    def share_first(self, value: Tensor) -> Tensor:
        """Return the first rank's value of a tensor on every rank."""


def get_blocks(model: nn.Module, option: str) -> list[nn.Module]:
    """Return the blocks of a model, in order, which a strategy shards one by one.

    Args:
        model: Any model.
        option: Name of the strategy's option, for the error message.

    Raises:
        ConfigError: The model has no `blocks`: sharded as one unit, every rank would gather all of it at once.
    """
    if not named_blocks(model):
        raise ConfigError(
            f"strategy={option}",
            f"it shards block by block, and {type(model).__name__} has no `blocks`",
            "strategy=ddp",
        )
    return list_blocks(model)


def skip_step(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], skips: Tensor) -> None:
    """Make the next step of an optimizer a no-op where a 0-dim bool tensor is true.

    A fused optimizer with parameters on a GPU reads the flag on the device. For any other optimizer the flag is read on
    the host and the gradients are dropped; the read is free on a CPU and synchronizes once with a GPU.
    """
    # `found_inf` must be set on torch's optimizer: on Lightning's wrapper the fused kernel would not see it
    inner: Any = unwrap_optimizer(optimizer)
    parameters = list(parameters)
    is_fused = all(group.get("fused") for group in inner.param_groups)
    # where the kernel runs: under FSDP with offload the norm, and so the flag, is on the GPU and the weights are on the
    # host, to which torch's optimizers copy the flag without synchronizing
    device = get_local_device(parameters)
    # without state the first step creates it even when skipped, so it must not run at all
    if device.type == "cuda" and is_fused and inner.state:
        inner.found_inf = skips.to(device, torch.float32)
        return
    inner.found_inf = None  # may be left from an earlier step: a rollback to before the first step leaves no state
    if bool(skips):
        for parameter in parameters:
            parameter.grad = None


def get_local_device(parameters: Iterable[nn.Parameter]) -> torch.device:
    """Return the device of this rank's parameters or shards: the host under FSDP with offload."""
    parameter = next(iter(parameters))
    return parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device
