"""The `Engine` of single device, DDP and FSDP2: gradient norm and clipping where torch holds the gradients itself.

The norm costs one read of the gradients, and one all-reduce where they are sharded; it stays on the device.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch.plugins import Precision as Plugin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard

from recipes.clipping import Clipping
from recipes.lightning_internals import state_left_on_device
from recipes.numerics.collectives import sum_over_ranks
from recipes.strategy import StepGuard, skip_step
from recipes.strategy.precision_plugin import get_loss_scale, get_num_overflows

# torch 2.13 adds float32 squares on a CPU one after the other: the sum of 38 million comes out 0.26 % too small
_CHUNK = 4096


class TorchNativeMixin:
    """Implements `recipes.strategy.Engine`; stands before Lightning's strategy among the base classes.

    Attributes:
        grad_norm: Global L2 norm before clipping of the last optimizer step, a 0-dim tensor; None before the first.
        clip_threshold: Norm to which the gradients of that step were limited, a 0-dim tensor; inf without a limit.
        guard: Skips steps; None executes every step.
        clipping: Adaptive limit of the norm in addition to the fixed one; None disables it.
        frees_gradients: Whether gradients are freed after the step; False zeroes them in place.
    """

    grad_norm: Tensor | None = None
    clip_threshold: Tensor | None = None
    guard: StepGuard | None = None
    clipping: Clipping | None = None
    optimizers: list[torch.optim.Optimizer]
    frees_gradients = True
    precision_plugin: Plugin
    root_device: torch.device

    def materialize(self, model: nn.Module, initialize: Callable[[nn.Module], None]) -> None:
        """Put the full model on the device; weights depend on seed and name alone, so all ranks have the same."""
        model.to_empty(device=self.root_device)
        initialize(model)

    def teardown(self) -> None:
        """End the run without a copy of its state to the host."""
        strategy: Any = self
        with state_left_on_device(strategy):
            super().teardown()  # type: ignore[misc]

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer; a loss scaler then unscales before gradients are clipped, not in a fused kernel."""
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        return optimizer

    def clip_gradients(
        self, parameters: Iterable[nn.Parameter], *, max_norm: float | None, max_value: float | None
    ) -> None:
        """Clip in place, record the global norm from before, and let the guard skip the step."""
        parameters = list(parameters)
        norm, self.clip_threshold = clip_gradients(
            parameters, max_norm=max_norm, max_value=max_value, clipping=self.clipping
        )
        self.grad_norm = norm
        if self.guard is not None:
            skip_step(self.optimizers[0], parameters, self.guard.judge(norm))

    def scale_loss(self, value: Tensor) -> Tensor:
        """Return a tensor times the loss scale, on the device."""
        scaler = getattr(self.precision_plugin, "scaler", None)
        return value if scaler is None else scaler.scale(value)

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks."""
        return sum_over_ranks(value, self.root_device)

    @property
    def current_loss_scale(self) -> float | None:
        """Factor on the loss; None without a loss scaler."""
        return get_loss_scale(self.precision_plugin)

    @property
    def num_overflows(self) -> int:
        """Optimizer steps skipped because a gradient was not finite."""
        return get_num_overflows(self.precision_plugin)


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    *,
    max_norm: float | None,
    max_value: float | None,
    clipping: Clipping | None = None,
) -> tuple[Tensor, Tensor]:
    """Measure the global gradient norm and clip in place. Waits for no device.

    Args:
        parameters: Plain tensors or DTensors of one mesh; those without a gradient are ignored.
        max_norm: Largest global L2 norm; None disables clipping by norm.
        max_value: Largest absolute value of an element; None disables clipping by value.
        clipping: Adaptive limit of the norm, in addition to `max_norm`; None disables it.

    Returns:
        The global L2 norm before clipping over all shards, a 0-dim tensor, inf where a gradient is NaN or inf (as
        DeepSpeed reports it); and the limit of the norm, a 0-dim tensor, inf where there was none.
    """
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    grads = [parameter.grad for parameter in with_grad if parameter.grad is not None]
    norm = global_norm(grads)  # 0-dim, float32
    limit = torch.full_like(norm, torch.inf if max_norm is None else max_norm)  # 0-dim
    if clipping is not None:
        limit = torch.minimum(limit, clipping.limit(norm))
        # the formula of clip_grads_with_norm_, which accepts no limit on the device: reading it would wait
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)  # 0-dim
        for grad in grads:
            local = _local(grad)
            local.mul_(scale.to(local.device))
    elif max_norm is not None:
        nn.utils.clip_grads_with_norm_(with_grad, max_norm, norm)
    if max_value is not None:
        nn.utils.clip_grad_value_(with_grad, max_value)
    return torch.where(norm.isfinite(), norm, torch.inf), limit


def global_norm(grads: list[Tensor]) -> Tensor:
    """Return the L2 norm over all elements of all gradients and all shards, a 0-dim float32 tensor."""
    if grads and _local(grads[0]).device.type != "cpu":
        norm = nn.utils.get_total_norm(grads)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    parts = [_local(grad) for grad in grads]
    small = [part for part in parts if 0 < part.numel() <= _CHUNK]
    squares = torch.zeros((), dtype=torch.float64)
    if small:  # biases and norms are half of all parameters: one call for all of them
        norms = torch._foreach_norm(small, 2, dtype=torch.float32)
        squares = torch.stack(norms).double().square().sum()
    for part in parts:
        if part.numel() > _CHUNK:
            squares = squares + _sum_of_squares(part)
    if grads and isinstance(grads[0], DTensor):
        # a sum over this rank's rows is one addend of the total: Partial, all-reduced by full_tensor;
        # along a replicated axis every rank has the same sum already, and adding it would count it twice
        placements = [Partial() if isinstance(p, Shard) else p for p in grads[0].placements]
        addend = DTensor.from_local(squares, grads[0].device_mesh, placements, run_check=False)
        squares = addend.full_tensor()
    return squares.sqrt().float()


def _sum_of_squares(grad: Tensor) -> Tensor:
    """Add in float64 over chunks whose norms are computed in float32; exact to 1e-7."""
    flat = grad.detach().reshape(-1)  # [N]
    in_chunks = flat[: flat.numel() // _CHUNK * _CHUNK].view(-1, _CHUNK)  # [N // 4096, 4096]
    rest = flat[in_chunks.numel() :].double()  # [N % 4096]
    chunks = torch.linalg.vector_norm(in_chunks.float(), dim=1).double()  # [N // 4096]
    squares: Tensor = chunks.square().sum() + rest.square().sum()  # 0-dim
    return squares


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad
