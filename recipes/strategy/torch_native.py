"""Gradient norm, clipping and step skipping for the single-device, DDP and FSDP2 strategies.

The norm costs one read of the gradients, and one all-reduce where they are sharded; it stays on the device.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision as Plugin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipes.clipping import Clipping
from recipes.engine import StepGuard
from recipes.lightning_internals import state_left_on_device
from recipes.parallel.stages import is_copy
from recipes.strategy import skip_step
from recipes.strategy.mesh_ranks import MeshRanksMixin
from recipes.strategy.precision_plugin import get_loss_scale, get_num_overflows

# torch 2.13 adds float32 squares sequentially on a CPU: the sum of 38 million comes out 0.26 % too small
_CHUNK = 4096


class TorchNativeMixin(MeshRanksMixin):
    """Implements `recipes.engine.Engine`; must precede Lightning's strategy among the base classes.

    Attributes:
        grad_norm: Global L2 norm before clipping at the last optimizer step, a 0-dim tensor; None before the first.
        clip_threshold: Norm limit applied at that step, a 0-dim tensor; inf without a limit.
        guard: Decides which steps to skip; None executes every step.
        clipping: Adaptive norm limit in addition to the fixed one; None disables it.
        frees_gradients: Whether gradients are freed after the step; False zeroes them in place.
    """

    grad_norm: Tensor | None = None
    clip_threshold: Tensor | None = None
    guard: StepGuard | None = None
    clipping: Clipping | None = None
    optimizers: list[torch.optim.Optimizer]
    frees_gradients = True
    precision_plugin: Plugin

    def materialize(
        self, model: nn.Module, initialize: Callable[[nn.Module], None], *, is_trained: bool = True
    ) -> nn.Module:
        """Put the full model on the device; weights depend only on seed and name, so all ranks have the same."""
        model.to_empty(device=self._strategy.root_device)
        initialize(model)
        return model

    def teardown(self) -> None:
        """Tear down without copying the state to the host."""
        strategy: Any = self
        with state_left_on_device(strategy):
            super().teardown()  # type: ignore[misc]

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer; makes a loss scaler unscale before clipping instead of inside a fused kernel."""
        untyped: Any = optimizer
        untyped._step_supports_amp_scaling = False
        return optimizer

    def clip_gradients(
        self, parameters: Iterable[nn.Parameter], *, max_norm: float | None, max_value: float | None
    ) -> None:
        """Clip in place, record the global norm before clipping, and let the guard skip the step."""
        parameters = list(parameters)
        norm, self.clip_threshold = clip_gradients(
            parameters, max_norm=max_norm, max_value=max_value, clipping=self.clipping
        )
        self.grad_norm = norm
        if self.guard is not None:
            skip_step(self.optimizers[0], parameters, self._agree(self.guard.judge(norm)))

    def _agree(self, skips: Tensor) -> Tensor:
        """Return whether any rank skips the step, as ranks that hold parts of one model must all agree.

        They judge the same loss and norm, but reductions in different process groups may differ in the last bit.
        """
        if self.mesh.model_size == 1:
            return skips
        worst = skips.to(self._communication_device, torch.float32, copy=True)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return worst.bool()

    def scale_loss(self, value: Tensor) -> Tensor:
        """Return a tensor times the loss scale, on the device."""
        scaler = getattr(self.precision_plugin, "scaler", None)
        return value if scaler is None else scaler.scale(value)

    @property
    def current_loss_scale(self) -> float | None:
        """Current loss scale; None without a loss scaler."""
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
    """Measure the global gradient norm and clip in place, without synchronizing the device.

    Args:
        parameters: Plain tensors or DTensors, in any mix of placements; those without a gradient are ignored.
        max_norm: Largest global L2 norm; None disables clipping by norm.
        max_value: Largest absolute value of an element; None disables clipping by value.
        clipping: Adaptive norm limit in addition to `max_norm`; None disables it.

    Returns:
        The global L2 norm before clipping over all shards, a 0-dim tensor, inf if a gradient is NaN or inf (as
        DeepSpeed reports it); and the norm limit, a 0-dim tensor, inf if there was none.
    """
    parameters = list(parameters)
    with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    grads = [parameter.grad for parameter in with_grad if parameter.grad is not None]
    # a copy of another stage's parameter has the same gradient, which must count once
    own_grads = [grad for grad, p in zip(grads, with_grad, strict=True) if not is_copy(p)]
    norm = global_norm(own_grads, parameters=parameters)  # 0-dim, float32
    limit = torch.full_like(norm, torch.inf if max_norm is None else max_norm)  # 0-dim
    if clipping is not None:
        limit = torch.minimum(limit, clipping.limit(norm))
    # local shards: torch 2.13 cannot multiply a list of DTensors on several meshes or mixed with plain tensors
    parts = [_local(grad) for grad in grads]
    if parts and (max_norm is not None or clipping is not None):
        # the formula of torch's `clip_grads_with_norm_`, which accepts no limit on the device: reading it would sync
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)  # 0-dim
        torch._foreach_mul_(parts, scale.to(parts[0].device))
    if parts and max_value is not None:
        torch._foreach_clamp_min_(parts, -max_value)
        torch._foreach_clamp_max_(parts, max_value)
    return torch.where(norm.isfinite(), norm, torch.inf), limit


def global_norm(grads: list[Tensor], *, parameters: Sequence[Tensor] = ()) -> Tensor:
    """Return the L2 norm over all elements of all gradients and all shards, a 0-dim float32 tensor.

    Args:
        grads: Gradients of this rank.
        parameters: Parameters of this rank, also those without a gradient: a rank whose pipeline stage is frozen has no
            gradient, and joins the sum of the others.
    """
    meshes = {tensor.device_mesh for tensor in (*grads, *parameters) if isinstance(tensor, DTensor)}
    if not (grads or meshes):
        return torch.zeros(())
    squares = _own_squares(grads) if grads else torch.zeros((), dtype=torch.float64)  # 0-dim float64
    if meshes:
        # over all ranks, whatever mesh a gradient is on: each element is counted once
        squares = squares.to(next(iter(meshes)).device_type)  # offloaded gradients are in host memory
        dist.all_reduce(squares)
    return squares.sqrt().float()


def _own_squares(grads: list[Tensor]) -> Tensor:
    """Return the sum of squares of the elements for which this rank is the first holder, 0-dim float64."""
    parts = [_local(grad) for grad in grads if _holds_first(grad)]
    device = _local(grads[0]).device
    squares = torch.zeros((), dtype=torch.float64, device=device)
    if device.type != "cpu":
        of_parts = list(torch._foreach_norm(parts, 2, dtype=torch.float32)) if parts else []
        return torch.stack(of_parts).double().square().sum() if of_parts else squares
    small = [part for part in parts if 0 < part.numel() <= _CHUNK]
    if small:  # biases and norms are half of all parameters: one call for all of them
        norms = torch._foreach_norm(small, 2, dtype=torch.float32)
        squares = torch.stack(norms).double().square().sum()
    for part in parts:
        if part.numel() > _CHUNK:
            squares = squares + _sum_of_squares(part)
    return squares


def _holds_first(grad: Tensor) -> bool:
    """Return whether no earlier rank holds the same elements; plain tensors always count."""
    if not isinstance(grad, DTensor):
        return True
    coordinates = grad.device_mesh.get_coordinate()
    assert coordinates is not None, "every rank is in the mesh"
    # only `is_replicate` is right for all placements of torch 2.13: a strided shard is not a `Shard`
    held = zip(coordinates, grad.placements, strict=True)
    return not any(coordinate and placement.is_replicate() for coordinate, placement in held)


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
