"""What a strategy is to tasks, modes, data and callbacks: the `Engine` protocol, and how they get one."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, cast

import lightning.pytorch as lightning
import torch
from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor, nn

from recipes.clipping import Clipping
from recipes.mesh import Mesh
from recipes.parallel.groups import Groups
from recipes.parallel.schedule import PipelineSchedule

T = TypeVar("T")
E = TypeVar("E", bound="Engine")


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
    """Interface of a strategy to tasks, modes, data and callbacks, which never depend on a particular strategy.

    They get it from `get_engine`, or as `task.engine`. It is all that they read of a strategy.

    The objective of a step is the sum, over micro-batches and over ranks with different tokens, of what each of them
    computes; an engine averages gradients over these ranks, `averaged_size` of them. A task multiplies what it returns
    by this number (`TrainingTask.scale`), and so trains on the sum.

    Attributes:
        grad_norm: Global L2 norm before clipping at the last optimizer step, a 0-dim tensor; None before the first.
        clip_threshold: Norm limit applied at that step, a 0-dim tensor; inf without a limit.
        guard: Skips optimizer steps; None executes every step. Set through the task, by the callback that watches them
            (`callbacks/loss_spike/reader.py`).
        clipping: Adaptive norm limit in addition to the fixed one; None disables it.
        current_loss_scale: Loss scale, read from the device; None without a loss scaler.
        num_overflows: Optimizer steps that this process skipped because a gradient was not finite.
        frees_gradients: Whether gradients are freed after the step; False zeroes them in place.
        shards_weights: Whether each rank keeps a shard of the weights, block by block.
        gathers_by_hooks: Whether hooks that torch.compile cannot trace gather the weights.
        root_device: Device of this rank.
        mesh: Sizes of the device mesh.
        groups: The process groups that this rank is in.
        data_rank: Data-parallel rank, below `data_size`.
        data_size: Number of ranks, or groups of ranks, with different samples.
        averaged_size: Number of ranks with different tokens, over which gradients are averaged.
        pipeline: Computes the gradients of a step under pipeline parallelism; None without it.
        num_micro_batches: Micro-batches per step, for a pipeline. Set by `build`.
        checkpoint_io: Writes and reads checkpoints.
    """

    guard: StepGuard | None
    clipping: Clipping | None
    data_size: int
    averaged_size: int
    pipeline: PipelineSchedule | None
    num_micro_batches: int

    @property
    def grad_norm(self) -> Tensor | None: ...

    @property
    def clip_threshold(self) -> Tensor | None: ...

    @property
    def current_loss_scale(self) -> float | None: ...

    @property
    def num_overflows(self) -> int: ...

    @property
    def frees_gradients(self) -> bool: ...

    @property
    def shards_weights(self) -> bool: ...

    @property
    def gathers_by_hooks(self) -> bool: ...

    @property
    def root_device(self) -> torch.device: ...

    @property
    def mesh(self) -> Mesh: ...

    @property
    def groups(self) -> Groups: ...

    @property
    def data_rank(self) -> int: ...

    @property
    def checkpoint_io(self) -> CheckpointIO: ...

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

    def gather_over_data_ranks(self, value: Tensor) -> Tensor:
        """Return the rows of all data-parallel ranks, [B, ...] -> [N B, ...] in rank order; differentiable.

        The gradient of this rank's rows is the sum over ranks of the gradients that each has for them. The objective is
        the sum of what the ranks compute, so a loss that compares a rank's samples with those of all ranks has the
        gradient of one device, and so has a loss of all rows that one rank computes. One that every rank computes
        from all rows is N times in that sum: divide it by `data_size`, or by a count that is summed over ranks.

        A collective: every rank must call it with an equal shape, and all or none run a backward pass through it.
        """

    def gather_for_generation(self) -> AbstractContextManager[bool]:
        """Prepare the weights for text generation; yield whether a forward pass then needs no other rank."""

    def share_first(self, value: Tensor) -> Tensor:
        """Return the first rank's value of a tensor on every rank."""

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the picklable object of one rank on all ranks."""

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""

    def batch_to_device(self, batch: Any) -> Any:
        """Return a batch on the device of this rank."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return this rank's shards of the weights by name, each with its place in the unsharded tensor."""

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return this rank's shards of the optimizer state."""

    def load_checkpoint(self, checkpoint_path: Any) -> dict[str, Any]:
        """Return the state of a checkpoint, with its tensors still on disk."""


def implements_engine(strategy: type[E]) -> type[E]:
    """Return the class, for which mypy checks that it has all members of `Engine`."""
    return strategy


def get_engine(trainer: lightning.Trainer) -> Engine:
    """Return the strategy of a Trainer that `recipes.build` has built, as tasks and modes see it."""
    return cast(Engine, trainer.strategy)
