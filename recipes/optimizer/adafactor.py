"""Adafactor (arXiv 1804.04235): second moments per row and column instead of per element, no first moment.

4 bytes of state per row and per column, nothing per element of a matrix. `torch.optim.Adafactor` (2.13) computes
the same on one device; with sharded parameters it raises for matrices and uses local norms for vectors. Here the
statistics of many parameters are summed over ranks in one all-reduce, and the norms of their updates in another.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from recipes.optimizer.groupwise import GroupwiseOptimizer
from recipes.optimizer.param_groups import check_matrices, decay_groups
from recipes.optimizer.shards import Layout, get_layout, local


class Adafactor(GroupwiseOptimizer):
    """Adafactor with decoupled weight decay and steps relative to the scale of a parameter.

    A convolution kernel counts as a matrix with one row per output channel; vectors have a second moment per element.
    Rows of a vocabulary's padding enter no mean.

    Args:
        model: Model whose trainable parameters are optimized; vectors are not decayed.
        lr: Peak step size relative to the RMS of the parameter, at most 1 / sqrt(step); the scheduler multiplies it.
        beta2_decay: At step t, the second moment is updated with weight t^beta2_decay.
        eps: Square root of the minimum second moment, and minimum parameter RMS for relative steps.
        clip_threshold: Maximum RMS of an update before it is multiplied by the step size.
        weight_decay: Weight decay of matrices, multiplied by the learning rate.

    Raises:
        ConfigError: A weight stacks the matrices of several layers, such as experts.
    """

    accepts_flat_partitions: ClassVar[bool] = False
    needs_unsharded: ClassVar[bool] = True
    updates_matrices: ClassVar[bool] = True
    float32_state: ClassVar[tuple[str, ...]] = ("row_var", "col_var", "variance")
    replicated_state: ClassVar[tuple[str, ...]] = ("row_var", "col_var")  # the same on all ranks, sharded or not

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: Annotated[float, "> 0"],
        beta2_decay: Annotated[float, "<= 0"],
        eps: tuple[Annotated[float, ">= 1e-18"], Annotated[float, ">= 0"]],
        clip_threshold: Annotated[float, ">= 1"],
        weight_decay: Annotated[float, ">= 0"],
    ) -> None:
        defaults = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": (float(eps[0]), float(eps[1])),
            "clip_threshold": clip_threshold,
        }
        check_matrices(model, optimizer="adafactor")
        self._real_rows = dict(_find_padded(model))
        super().__init__(decay_groups(model, weight_decay=weight_decay), defaults)

    @override
    def step_chunk(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        layout, (eps1, eps2) = get_layout(parameters[0]), group["eps"]
        rows = [self._real_rows.get(parameter, len(parameter)) for parameter in parameters]
        states = [self._count(parameter) for parameter in parameters]
        grads = [_as_matrix(parameter.grad) for parameter in parameters if parameter.grad is not None]
        sizes, mean_squares = _measure(parameters, grads, rows, layout)
        kept = [moment for state in states for moment in _moments(state)]
        weights = [state["step"] ** group["beta2_decay"] for state in states for _ in _moments(state)]  # first 1
        torch._foreach_lerp_(kept, mean_squares, weights)
        updates = _second_moments(states, rows, layout, eps1)  # of the elements of this rank
        torch._foreach_clamp_min_(updates, eps1 * eps1)
        torch._foreach_rsqrt_(updates)
        torch._foreach_mul_(updates, grads)
        counts = _count_elements(parameters, rows)
        rms = _sum_over_shards(_root_mean_squares(updates, counts).square(), layout).sqrt()  # [parameters]
        scales = sizes.clamp(min=eps2) / (rms / group["clip_threshold"]).clamp(min=1.0)  # [parameters]
        torch._foreach_mul_(updates, scales.unbind())
        torch._foreach_mul_(updates, [min(group["lr"], state["step"] ** -0.5) for state in states])
        shards = [local(parameter) for parameter in parameters]
        torch._foreach_mul_(shards, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_sub_(shards, [update.view(shard.shape) for update, shard in zip(updates, shards, strict=True)])

    def _count(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the state of a parameter, with this step counted."""
        state: dict[str, Any] = self.state[parameter]
        if "step" not in state:
            state["step"] = 0
            if parameter.ndim == 1:
                # shape of the parameter, and its sharding
                state["variance"] = torch.zeros_like(parameter, dtype=torch.float32)
            else:
                # unsharded on every rank: they are small, and each step needs all of them
                device, num_columns = local(parameter).device, math.prod(parameter.shape[1:])
                state["row_var"] = torch.zeros(len(parameter), dtype=torch.float32, device=device)  # [R]
                state["col_var"] = torch.zeros(num_columns, dtype=torch.float32, device=device)  # [C]
        state["step"] += 1
        return state


def _find_padded(model: nn.Module) -> Iterator[tuple[nn.Parameter, int]]:
    """Yield each weight with rows for tokens that do not exist, and its number of rows without them.

    They are zero and stay zero; a mean over all rows would depend on how far the vocabulary is padded.
    """
    vocab_size = getattr(model, "vocab_size", None)
    named = dict(model.named_parameters())
    for name in ("embedding.weight", "head.weight"):  # see `recipes.model.Model`
        if name in named and vocab_size is not None and len(named[name]) > vocab_size:
            yield named[name], vocab_size


def _count_elements(parameters: Sequence[Tensor], rows: Sequence[int]) -> list[int]:
    """Return the number of elements of each parameter in its rows that are not padding."""
    return [num_rows * math.prod(parameter.shape[1:]) for parameter, num_rows in zip(parameters, rows, strict=True)]


def _moments(state: dict[str, Any]) -> list[Tensor]:
    """Return the stored second moments: of rows, [R], and columns, [C]; or of this rank's shard of a vector."""
    return [local(state["variance"])] if "variance" in state else [state["row_var"], state["col_var"]]


def _second_moments(states: list[dict[str, Any]], num_rows: Sequence[int], layout: Layout, eps1: float) -> list[Tensor]:
    """Return the second moment of every element of this rank, [rows, C] or [rows], in new tensors."""
    found = []
    for state, num_real in zip(states, num_rows, strict=True):
        if "variance" in state:
            found.append(local(state["variance"]).clone())
            continue
        row_var, col_var = state["row_var"], state["col_var"]
        rows = layout.rows(of=len(row_var))
        found.append(torch.outer(row_var[rows] / row_var[:num_real].mean().clamp(min=eps1), col_var))
    return found


def _measure(
    parameters: list[nn.Parameter], grads: list[Tensor], rows: Sequence[int], layout: Layout
) -> tuple[Tensor, list[Tensor]]:
    """Return the RMS of each parameter, [parameters], and the mean squares of their gradients.

    The latter are, for a matrix, those of the rows, [R], then those of the columns, [C]; for a vector, the square of
    each element of this rank.
    """
    counts = _count_elements(parameters, rows)
    pieces = [_root_mean_squares([_as_matrix(parameter) for parameter in parameters], counts)]
    places, lengths, divisors = [slice(0, len(parameters))], [len(parameters)], [1.0]
    matrices = [each for each in zip(parameters, grads, rows, strict=True) if each[1].ndim == 2]
    for parameter, grad, num_real in matrices:
        num_rows, num_columns = len(parameter), grad.shape[1]
        pieces += [_norms_along(grad, dim=1), _norms_along(grad, dim=0)]
        divisors += [num_columns**0.5, num_real**0.5]
        places += [layout.rows(of=num_rows), slice(0, num_columns)]
        lengths += [num_rows, num_columns]
    torch._foreach_div_(pieces, divisors)
    summed = pieces[0].new_zeros(sum(lengths))  # zero in rows that other ranks hold
    parts = summed.split(lengths)
    torch._foreach_copy_([part[place] for part, place in zip(parts, places, strict=True)], pieces)
    _sum_over_shards(summed.square_(), layout)
    of_matrices = iter(parts[1:])
    mean_squares: list[Tensor] = []
    for grad in grads:
        mean_squares += [grad.square()] if grad.ndim == 1 else [next(of_matrices), next(of_matrices)]
    return parts[0].sqrt(), mean_squares


def _as_matrix(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a tensor in float32, [rows, C], or [rows] for a vector."""
    rows = local(tensor).float()
    return rows if rows.ndim == 1 else rows.flatten(1)


def _root_mean_squares(tensors: list[Tensor], counts: list[int]) -> Tensor:
    """Return the norm of each tensor divided by the root of a count, [tensors]."""
    if tensors[0].is_cpu:
        # row by row: one norm of many elements is inexact on a CPU (torch 2.13)
        norms = [_norms_along(_norms_along(tensor, dim=-1), dim=-1) for tensor in tensors]
    else:
        norms = list(torch._foreach_norm(tensors))
    torch._foreach_div_(norms, [count**0.5 for count in counts])
    return torch.stack(norms)


def _norms_along(tensor: Tensor, *, dim: int) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=dim)
    return norms


def _sum_over_shards(values: Tensor, layout: Layout) -> Tensor:
    """Sum over the ranks that hold a copy of the model, in place; all copies get the same bits."""
    if layout.shards is None:
        return values
    if layout.replica > 0:
        values.zero_()
    dist.all_reduce(values, group=layout.shards if layout.replicas is None else None)
    return values
