"""Muon (Jordan et al. 2024; arXiv 2502.16982): orthogonalized momentum for hidden matrices, AdamW for the rest.

4 bytes of state per element of a hidden matrix, 8 for other parameters. Orthogonalizing a matrix takes 15 matmuls per
step, independent of the batch size; the matrices are distributed over ranks.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from recipes.adapter import is_factor
from recipes.blocks import list_blocks
from recipes.errors import ConfigError
from recipes.model import Stack
from recipes.model.init import unsharded_shape
from recipes.optimizer.groupwise import GroupwiseOptimizer
from recipes.optimizer.param_groups import check_matrices, decay_groups
from recipes.optimizer.shards import Layout, get_layout, in_chunks, local

LOGGER = logging.getLogger("lightning_recipes")
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


@runtime_checkable
class NamesStacks(Protocol):
    """A model that names its fused layers, whose weights stack matrices by rows, by columns or in groups."""

    def stacks(self) -> dict[str, Stack | None]:
        """Return the matrices in the weight of each fused layer, by name; None if they are not known."""


class Muon(GroupwiseOptimizer):
    """Muon for the matrices inside the blocks of a model, AdamW for embeddings, head, norms and biases.

    A convolution kernel counts as a matrix with one row per output channel. What is taken as a matrix is logged.

    Args:
        model: Model whose trainable parameters are optimized; vectors are not decayed. Modules that stack matrices in
            one parameter, such as queries, keys and values, implement `StacksMatrices`, or the model `NamesStacks`.
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
        ConfigError: There is no matrix in the blocks, or it is not known which matrices a weight stacks.
    """

    accepts_flat_partitions: ClassVar[bool] = False
    needs_unsharded: ClassVar[bool] = True
    updates_matrices: ClassVar[bool] = True
    replicated_state: ClassVar[tuple[str, ...]] = ("step",)  # of AdamW, the same on all ranks

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: Annotated[float, "> 0"],
        adamw_lr: Annotated[float, "> 0"] | None,
        momentum: Annotated[float, ">= 0, < 1"],
        betas: tuple[Annotated[float, ">= 0, < 1"], Annotated[float, ">= 0, < 1"]],
        eps: Annotated[float, "> 0"],
        weight_decay: Annotated[float, ">= 0"],
    ) -> None:
        self.replicas: dist.ProcessGroup | None = None
        self.product_dtype: torch.dtype | None = None
        check_matrices(model, optimizer="muon")
        hidden = _hidden_matrices(model)
        self._stacks = {parameter: stack for parameter, stack in _find_stacks(model) if parameter in hidden}
        _log_matrices(model, hidden, self._stacks)
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
        if "momentum" not in group:  # rules may have divided either kind of group
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
            stack = self._stacks.get(parameters[index])
            return _orthogonalize_scaled(matrix) if stack is None else _orthogonalize_stack(matrix, stack)

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


def _orthogonalize_scaled(matrix: Tensor) -> Tensor:
    """Return an orthogonal matrix [R, C] whose elements have the root mean square of an AdamW update."""
    # elements of an orthogonal [R, C] have a root mean square of 1 / sqrt(max(R, C))
    return orthogonalize(matrix).mul_(_ADAMW_RMS * math.sqrt(max(matrix.shape)))


def _orthogonalize_stack(matrix: Tensor, stack: Stack) -> Tensor:
    """Orthogonalize each matrix of a stack [R, C] by itself."""
    rows = matrix.mT if stack.by_columns else matrix  # [outputs, inputs]
    groups = rows.reshape(stack.num_groups, -1, rows.shape[1])  # [groups, outputs of a group, inputs]
    parts = groups.split(stack.sizes, dim=1)
    done = [_orthogonalize_scaled(part.reshape(-1, rows.shape[1])).reshape(part.shape) for part in parts]
    joined = torch.cat(done, dim=1).view(rows.shape)
    return joined.mT.contiguous() if stack.by_columns else joined


def _hidden_matrices(model: nn.Module) -> dict[nn.Parameter, None]:
    """Return the trainable parameters with two or more dimensions in the blocks of a model, in order.

    Without embeddings, whose rows are looked up one by one.
    """
    blocks = list_blocks(model)
    rows = {
        parameter
        for block in blocks
        for module in block.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters(recurse=False)
    }
    named = (each for block in blocks for each in block.named_parameters())
    trained = [parameter for name, parameter in named if parameter.requires_grad and not is_factor(name)]
    hidden = {p: None for p in trained if len(unsharded_shape(p)) >= 2 and p not in rows}
    if not hidden:
        what = "trained matrix in its `blocks`" if blocks else "`blocks`"
        raise ConfigError(
            "optimizer=muon",
            f"it orthogonalizes the matrices of a model's blocks, and {type(model).__name__} has no {what}",
            "optimizer=adamw",
        )
    return hidden


def _find_stacks(model: nn.Module) -> Iterator[tuple[nn.Parameter, Stack]]:
    """Yield each trained parameter that is a stack of matrices.

    Raises:
        ConfigError: It is not known which matrices a weight stacks.
    """
    for name, parameter, stack in _find_fused_weights(model):
        if not parameter.requires_grad:
            continue
        if stack is None:
            raise ConfigError(
                "optimizer=muon",
                f"{name} computes several matrix products at once, and the layout of its fused weight is unknown",
                "optimizer=adamw",
            )
        outputs = unsharded_shape(parameter)[1 if stack.by_columns else 0]
        assert sum(stack.sizes) * stack.num_groups == outputs, f"{name}: {stack} is not {outputs} outputs"
        yield parameter, stack


def _find_fused_weights(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Stack | None]]:
    """Yield name, weight and stack of each layer that stacks matrices, also in the modules of torch."""
    for path, module in model.named_modules():
        stacks: dict[str, Stack | None] = {}
        if isinstance(module, StacksMatrices):
            stacks = {name.rpartition(".")[0]: Stack(rows) for name, rows in module.stacked_rows().items()}
        elif isinstance(module, NamesStacks):
            stacks = module.stacks()
        for name, stack in stacks.items():
            layer: Any = module.get_submodule(name)
            yield f"{path}.{name}".lstrip("."), layer.weight, stack
            for factor in getattr(layer, "lora_B", {}).values():  # its rows are the outputs of the layer
                yield f"{path}.{name}.lora_B", factor.weight, stack and stack._replace(by_columns=False)
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            yield f"{path}.in_proj_weight", module.in_proj_weight, Stack((module.embed_dim,) * 3)
        if isinstance(module, nn.LSTM | nn.GRU):
            gates = Stack((module.hidden_size,) * (4 if isinstance(module, nn.LSTM) else 3))
            for name, parameter in module.named_parameters(recurse=False):
                if name.startswith(("weight_ih", "weight_hh")):
                    yield f"{path}.{name}", parameter, gates


def _log_matrices(model: nn.Module, hidden: Collection[nn.Parameter], stacks: Mapping[nn.Parameter, Stack]) -> None:
    """Log which parameters are taken as matrices, those of all blocks together."""
    counts: Counter[str] = Counter()
    for name, parameter in (named for block in list_blocks(model) for named in block.named_parameters()):
        if parameter in hidden:
            shape, stack = unsharded_shape(parameter), stacks.get(parameter)
            rows, columns = shape[0], math.prod(shape[1:])
            how = "" if stack is None else f" as {len(stack.sizes)} matrices"
            counts[f"{name} [{rows}, {columns}]{how}"] += 1
    described = ", ".join(f"{count} x {name}" for name, count in counts.items())
    LOGGER.info("Muon orthogonalizes %s; AdamW updates everything else", described)


def _local_grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return local(parameter.grad)


def _product_device(parameter: nn.Parameter) -> torch.device:
    """Return the compute device, which under FSDP with CPU offload differs from that of the shards."""
    if isinstance(parameter, DTensor) and parameter.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return parameter.device


# Distribute computations on unsharded matrices over ranks, for sharded or replicated parameters.
#
# Each result is computed by one rank and sent to the others, so all replicas get the same bits. For matrices with P
# elements in total, each of N ranks sends and receives 2 P / N elements if they are sharded, and P if they are
# replicated. Matrices are processed in rounds of N of about the same size to limit memory.

Shape = tuple[int, int]  # rows R and columns C of an unsharded matrix


@dataclass(frozen=True, kw_only=True)
class WholeMatrices:
    """Matrices and their layout over ranks.

    Attributes:
        shapes: Shapes of the unsharded matrices, the same on every rank.
        layout: Which ranks hold which rows.
        device: Device for computation and communication.
        dtype: Dtype for computation and communication.
    """

    shapes: Sequence[Shape]
    layout: Layout
    device: torch.device
    dtype: torch.dtype

    def map(
        self, function: Callable[[int, Tensor], Tensor], *, read: Callable[[int], Tensor]
    ) -> Iterator[tuple[int, Tensor]]:
        """Apply a function to every matrix; collective, call on every rank.

        Args:
            function: index, matrix [R, C] -> result [R, C], the same dtype.
            read: index -> this rank's rows, [rows, ...], in any dtype and on any device.

        Yields:
            Index and this rank's rows of the result, [rows, C], each matrix once.
        """
        layout = self.layout
        # largest first, so that the matrices of a round take about equally long
        order = sorted(range(len(self.shapes)), key=lambda index: -self.shapes[index][0] * self.shapes[index][1])
        num_ranks = layout.num_shards * layout.num_replicas
        for start in range(0, len(order), num_ranks):
            members = order[start : start + num_ranks]
            # of each copy of the model, the matrices that it works on: the i-th on its i-th rank
            shares = [members[replica :: layout.num_replicas] for replica in range(layout.num_replicas)]
            result = self._map_share(shares[layout.replica], function, read)
            for share, rows in zip(shares, self._share_results(shares, result), strict=True):
                parts = rows.split(self._num_held(share))
                for index, part in zip(share, parts, strict=True):
                    yield index, part.view(-1, self.shapes[index][1])

    def _map_share(
        self, share: list[int], function: Callable[[int, Tensor], Tensor], read: Callable[[int], Tensor]
    ) -> Tensor:
        """Return this rank's rows of the results of its copy's matrices, one after the other, flat."""
        layout = self.layout
        rows = [read(index).to(self.device, self.dtype).reshape(-1) for index in share]
        if not share:
            return self._empty(0)
        if layout.shards is None:  # unsharded: the local rows are the full matrix
            [index] = share
            return function(index, rows[0].view(self.shapes[index])).reshape(-1)
        num_idle = layout.num_shards - len(share)
        held = [*self._num_held(share), *[0] * num_idle]
        mine = share[layout.shard] if layout.shard < len(share) else None
        num_rows, num_columns = (0, 0) if mine is None else self.shapes[mine]
        gathered = [layout.num_rows(shard, of=num_rows) * num_columns for shard in range(layout.num_shards)]
        # the rows of the first rank, then those of the second, and so on: in order as they arrive
        whole = self._exchange(torch.cat(rows), held, gathered)  # [R C], or [0]
        if mine is not None:
            whole = function(mine, whole.view(num_rows, num_columns)).reshape(-1)
        return self._exchange(whole, gathered, held)

    def _num_held(self, indices: list[int]) -> list[int]:
        """Return the number of elements of each matrix on this rank."""
        shapes = [self.shapes[index] for index in indices]
        return [self.layout.num_rows(self.layout.shard, of=num_rows) * columns for num_rows, columns in shapes]

    def _exchange(self, values: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Send every rank of the copy its part of a flat tensor, by number of elements; return what they sent here."""
        received = self._empty(sum(receive))
        dist.all_to_all_single(received, values, receive, send, group=self.layout.shards)
        return received

    def _share_results(self, shares: list[list[int]], result: Tensor) -> list[Tensor]:
        """Return this rank's rows of the results of every copy's matrices, flat."""
        layout = self.layout
        if layout.replicas is None:
            return [result]
        own = layout.replica
        results = [
            result if replica == own else self._empty(sum(self._num_held(share)))
            for replica, share in enumerate(shares)
        ]
        transfers = [
            dist.broadcast(rows, group=layout.replicas, group_src=replica, async_op=True)
            for replica, rows in enumerate(results)
            if rows.numel()
        ]
        for transfer in transfers:
            transfer.wait()
        return results

    def _empty(self, num_elements: int) -> Tensor:
        return torch.empty(num_elements, dtype=self.dtype, device=self.device)
