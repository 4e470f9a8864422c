"""How a step is carried out on the devices: each engine a small subclass of Lightning's, answering `Engine`."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recipes.clipping import Clipping
from recipes.errors import ConfigError


class StepGuard(Protocol):
    """Whoever watches for spikes.

    Attributes:
        loss: Of the step about to be made, over all ranks, a 0-dim tensor; set before the backward pass ends.
    """

    loss: Tensor | None

    def judge(self, norm: Tensor) -> Tensor:
        """Whether a step with this global norm before clipping is refused, a 0-dim bool tensor; on every rank."""


class Engine(Protocol):
    """The questions that tasks and modes ask; no other code asks which strategy it runs under.

    Attributes:
        grad_norm: Global L2 norm before clipping of the last optimizer step, a 0-dim tensor; None before it.
        clip_threshold: What the gradients of that step were scaled down to where they were above; inf: nothing.
        guard: Refuses optimizer steps; None: every step is made.
        clipping: A limit of the norm from the norms before, beside the fixed one; None: there is none.
        current_loss_scale: What the loss is multiplied by; None without a loss scaler. Read from the device.
        num_overflows: Optimizer steps that this process skipped because a gradient was not finite.
        frees_gradients: Whether gradients are freed after the step; False: zeroed where they lie.
    """

    grad_norm: Tensor | None
    clip_threshold: Tensor | None
    guard: StepGuard | None
    clipping: Clipping | None
    frees_gradients: bool

    @property
    def root_device(self) -> torch.device: ...

    @property
    def current_loss_scale(self) -> float | None: ...

    @property
    def num_overflows(self) -> int: ...

    def place(self, model: nn.Module, initialize: Callable[[nn.Module], None]) -> None:
        """Distribute a model made on the meta device, in place, and give it its first weights.

        Args:
            initialize: Sets every parameter and buffer of a model that has storage; no collectives.
        """

    def own_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer this engine steps instead: the same one, or its own form of the same arithmetic."""

    def clip_gradients(
        self, parameters: Iterable[nn.Parameter], *, max_norm: float | None, max_value: float | None
    ) -> None:
        """Clip in place, where asked, before the optimizer steps; `grad_norm` is known after the step."""

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Add a tensor over all ranks; with several, the sum lies on their device."""


def get_blocks(model: nn.Module, option: str) -> Iterable[nn.Module]:
    """Return the blocks that a strategy shards one by one.

    Args:
        model: Any model.
        option: Option of the strategy, to name it in the message.

    Raises:
        ConfigError: The model has no `blocks`: sharded as one unit, it would be gathered at once on every rank.
    """
    blocks = getattr(model, "blocks", None)
    if blocks is None:
        raise ConfigError(
            f"strategy={option}",
            f"it shards block by block, and {type(model).__name__} has no `blocks`",
            "strategy=ddp",
        )
    return iter(blocks)


def skip_step(
    optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], refused: Tensor
) -> None:
    """Let an optimizer step without any effect where a 0-dim bool tensor is true.

    A fused optimizer on a GPU reads the flag there. Any other loses its gradients: the flag is read, which costs
    nothing on a CPU and one wait for the device on a GPU.
    """
    own: Any = getattr(optimizer, "_optimizer", optimizer)  # not into Lightning's wrapper
    is_fused = all(group.get("fused") for group in own.param_groups)
    if (
        refused.is_cuda and is_fused and own.state
    ):  # the first step makes the moments, refused or not
        own.found_inf = refused.float()
    elif bool(refused):
        for parameter in parameters:
            parameter.grad = None
