"""Muon (Jordan et al. 2024; arXiv 2502.16982): orthogonalized momentum for hidden matrices, AdamW for the rest.

4 bytes of state per element of a hidden matrix, 8 for other parameters. Orthogonalizing a matrix takes 15 matmuls per
step, independent of the batch size; the matrices are distributed over ranks.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from recipes.adapter import is_factor
from recipes.errors import ConfigError
from recipes.model.init import unsharded_shape
from recipes.optimizer.groupwise import GroupwiseOptimizer
from recipes.optimizer.param_groups import decay_groups
from recipes.optimizer.shards import get_layout, in_chunks, local
from recipes.optimizer.whole_matrices import WholeMatrices

# RMS of an AdamW update in units of the learning rate (arXiv 2502.16982, section 2.2): matching it allows the learning
# rate and weight decay of AdamW to be reused.
_ADAMW_RMS = 0.2
# The quintic a x + b x^3 + c x^5 moves every singular value toward 1. Jordan's coefficients trade accuracy for slope at
# 0: after five iterations a singular value of 0.01 is above 0.6, and all lie within 0.65 and 1.25.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_NUM_ITERATIONS = 5
_EPS = 1e-7  # added to the norm, so that a zero matrix stays zero


@runtime_checkable
class StacksMatrices(Protocol):
    """A module with a parameter that stacks several matrices by rows, each to be orthogonalized separately."""

    def stacked_rows(self) -> dict[str, tuple[int, ...]]:
        """Return the rows of each matrix in a stack, by the name of the parameter in the module."""


class Muon(GroupwiseOptimizer):
    """Muon for the matrices inside `model.blocks`, AdamW for embeddings, head, norms and biases.

    A convolution kernel counts as a matrix with one row per output channel.

    Args:
        model: Model whose trainable parameters are optimized; vectors are not decayed. Modules that stack matrices in
            one parameter, such as queries, keys and values, implement `StacksMatrices`.
        lr: Peak learning rate, on the scale of AdamW; the scheduler multiplies it.
        adamw_lr: Peak learning rate of parameters updated by AdamW; None: `lr`.
        momentum: Decay rate of the Nesterov momentum of hidden matrices, per optimizer step.
        betas: Decay rates of AdamW's first and second moment, per optimizer step.
        eps: Added to the square root of AdamW's second moment.
        weight_decay: Weight decay of all matrices.

    Attributes:
        replicas: Process group of ranks with the same weights and gradients, which share the work; None: every rank
            computes everything. For DTensors on a mesh with replication, taken from the mesh.
        product_dtype: Dtype of the matmuls; None: bfloat16 on a GPU, float32 elsewhere.

    Raises:
        ConfigError: There is no matrix in `model.blocks`.
    """

    accepts_flat_partitions: ClassVar[bool] = False

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: Annotated[float, "> 0, < inf"],
        adamw_lr: Annotated[float, "> 0, < inf"] | None,
        momentum: Annotated[float, ">= 0, < 1"],
        betas: tuple[Annotated[float, ">= 0, < 1"], Annotated[float, ">= 0, < 1"]],
        eps: Annotated[float, "> 0"],
        weight_decay: Annotated[float, ">= 0"],
    ) -> None:
        self.replicas: dist.ProcessGroup | None = None
        self.product_dtype: torch.dtype | None = None
        hidden = _hidden_matrices(model)
        self._stacks = dict(_find_stacks(model))
        groups = decay_groups(model, weight_decay=weight_decay)
        for group in groups:
            group["params"] = [parameter for parameter in group["params"] if parameter not in hidden]
        self._adamw = torch.optim.AdamW(
            groups,
            lr=lr if adamw_lr is None else adamw_lr,
            betas=(float(betas[0]), float(betas[1])),
            eps=eps,
            fused=True,
        )
        own = {"params": list(hidden), "group_name": "hidden", "weight_decay": weight_decay, "momentum": momentum}
        super().__init__([own | {"lr": lr}, *self._adamw.param_groups], {})

    @override
    def step_group(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        if group is not self.param_groups[0]:
            # loading a state dict replaces these objects
            self._adamw.param_groups, self._adamw.state = [group], self.state
            self._adamw.step()
        elif parameters:
            self._update_momenta(parameters, momentum=group["momentum"])
            self._update_matrices(parameters, group)

    def _update_momenta(self, parameters: list[nn.Parameter], *, momentum: float) -> None:
        for chunk in in_chunks(parameters):
            for parameter in chunk:
                if "momentum_buffer" not in self.state[parameter]:
                    # shape of the parameter, and its sharding
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            momenta = [local(self.state[parameter]["momentum_buffer"]) for parameter in chunk]
            torch._foreach_lerp_(momenta, [_local_grad(parameter) for parameter in chunk], 1 - momentum)

    def _update_matrices(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        lr, momentum = group["lr"], group["momentum"]
        device = _product_device(parameters[0])
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        matrices = WholeMatrices(
            shapes=[(parameter.shape[0], math.prod(parameter.shape[1:])) for parameter in parameters],
            layout=get_layout(parameters[0], replicas=self.replicas),
            device=device,
            dtype=self.product_dtype or dtype,
        )

        def read(index: int) -> Tensor:
            momenta = local(self.state[parameters[index]]["momentum_buffer"])
            # Nesterov lookahead
            return _local_grad(parameters[index]).lerp(momenta, momentum)  # [rows of this rank, ...]

        def direction(index: int, matrix: Tensor) -> Tensor:
            rows = self._stacks.get(parameters[index], (len(matrix),))
            stacked = matrix.split(rows)  # type: ignore[no-untyped-call]
            parts = [orthogonalize(part) for part in stacked]
            # elements of an orthogonal [R, C] have a root mean square of 1 / sqrt(max(R, C))
            scaled = [part.mul_(_ADAMW_RMS * math.sqrt(max(part.shape))) for part in parts]
            return scaled[0] if len(scaled) == 1 else torch.cat(scaled)  # [R, C]

        for index, rows in matrices.map(direction, read=read):
            weights = local(parameters[index])
            weights.mul_(1 - lr * group["weight_decay"])
            weights.add_(rows.view(weights.shape).to(weights.device), alpha=-lr)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return a matrix with the same singular vectors whose singular values are about 1.

    Costs 5 (4 k^2 n + 2 k^3) FLOPs for k rows and n columns, k the smaller of the two.

    Args:
        matrix: [R, C]; its dtype is that of the matmuls.

    Returns:
        [R, C], the same dtype.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if is_tall else matrix  # [k, n], k <= n
    # the Frobenius norm bounds the largest singular value; the iteration diverges above 1.27
    x = x / torch.linalg.vector_norm(x, dtype=torch.float32).clamp(min=_EPS).to(x.dtype)
    for _ in range(_NUM_ITERATIONS):
        gram = x @ x.mT  # [k, k]
        polynomial = torch.addmm(gram, gram, gram, beta=_B, alpha=_C)  # [k, k]
        x = torch.addmm(x, polynomial, x, beta=_A)  # [k, n]
    return x.mT if is_tall else x


def _hidden_matrices(model: nn.Module) -> dict[nn.Parameter, None]:
    """Return the trainable parameters with two or more dimensions in the blocks of a model, in order."""
    blocks = getattr(model, "blocks", None)
    named = [] if blocks is None else blocks.named_parameters()
    trained = [parameter for name, parameter in named if parameter.requires_grad and not is_factor(name)]
    hidden = {parameter: None for parameter in trained if len(unsharded_shape(parameter)) >= 2}
    if not hidden:
        what = "`blocks`" if blocks is None else "trained matrix in its `blocks`"
        raise ConfigError(
            "optimizer=muon",
            f"it orthogonalizes the matrices of a model's blocks, and {type(model).__name__} has no {what}",
            "optimizer=adamw",
        )
    return hidden


def _find_stacks(model: nn.Module) -> Iterator[tuple[nn.Parameter, tuple[int, ...]]]:
    """Yield each parameter that is a stack of matrices, with the rows of each."""
    for module in model.modules():
        if isinstance(module, StacksMatrices):
            for name, rows in module.stacked_rows().items():
                parameter = module.get_parameter(name)
                num_rows = unsharded_shape(parameter)[0]
                assert sum(rows) == num_rows, f"{name}: {rows} are not {num_rows} rows"
                yield parameter, rows


def _local_grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return local(parameter.grad)


def _product_device(parameter: nn.Parameter) -> torch.device:
    """Return the compute device, which under FSDP with CPU offload differs from that of the shards."""
    if isinstance(parameter, DTensor) and parameter.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return parameter.device
