"""DeepSpeed ZeRO 1 to 3: partition optimizer state, then gradients, then weights over ranks."""

import copy
import importlib
import logging
import os
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.strategies.ddp import DDPStrategy
from torch import Tensor, nn
from typing_extensions import override

from recipes.checkpoint.shards import PerRankSavingMixin
from recipes.clipping import Clipping
from recipes.engine import StepGuard, implements_engine
from recipes.errors import ConfigError
from recipes.lightning_internals import (
    complete_deepspeed_config,
    is_accumulating,
    join_deepspeed_process_group,
    state_left_on_device,
)
from recipes.mesh import Mesh
from recipes.parallel.context import apply_context_parallel
from recipes.precision import Precision, to_deepspeed_config
from recipes.strategy import get_blocks
from recipes.strategy.deepspeed.checkpoint import ZeroState, advance_step_count, flat_weights, in_memory, is_stage_3
from recipes.strategy.deepspeed.compiled_op import load_op
from recipes.strategy.deepspeed.partition import (
    DISK_SUB_GROUP,
    DISK_THREADS,
    fit_buckets,
    gather_in_compute_dtype,
    gather_where_read,
    gather_whole,
    keep_gathered,
    partition,
)
from recipes.strategy.mesh_ranks import MeshRanksMixin
from recipes.strategy.precision_plugin import ZeroPrecision

LOGGER = logging.getLogger("lightning_recipes")

# Skip or clip a step inside a ZeRO optimizer, where the gradient norm is first known: one comparison per step.
#
# To DeepSpeed, a skipped step looks like an overflow that leaves the loss scale unchanged.


class StepGuardMixin:
    """Implements the attributes of `recipes.engine.Engine` for steps inside a ZeRO optimizer.

    DeepSpeed 0.19.8 keeps the norm in a local variable of its step; the only call between that point and the update is
    `_update_scale`. This class therefore records the norm where it is computed and decides in `_update_scale`.

    Attributes:
        guard: Decides which steps to skip; None skips none.
        clipping: Adaptive norm limit in addition to the fixed one; None disables it.
        clip_threshold: Norm limit of the last step, 0-dim; inf without a limit, None before the first step.
    """

    deepspeed_engine: Any
    guard: StepGuard | None = None
    clipping: Clipping | None = None
    clip_threshold: Tensor | None = None

    def hook_into(self, optimizer: Any) -> None:
        """Insert this guard between the norm and the update of DeepSpeed's optimizer."""
        self._hooked = optimizer
        self._fixed_limit = optimizer.clip_grad or torch.inf  # DeepSpeed uses 0 for no limit
        # steps skipped for reasons other than an overflow; DeepSpeed counts both together
        self._num_skipped = 0
        self._skipped_norm: Tensor | None = None  # norm of the last step if the guard skipped it, 0-dim
        self._scaled_norm: Tensor | None = None
        self._update_scale = optimizer._update_scale
        optimizer._update_scale = self._decide
        if hasattr(optimizer, "scaled_global_norm"):  # stages 1 and 2
            self._compute_norm = optimizer.scaled_global_norm
            optimizer.scaled_global_norm = self._note_norm
        else:
            self._compute_norm = optimizer._get_norm_groups
            optimizer._get_norm_groups = self._note_norm_groups

    def _note_norm(self, *args: Any, **kwargs: Any) -> Any:
        norm = self._compute_norm(*args, **kwargs)
        self._scaled_norm = torch.as_tensor(norm, dtype=torch.float32)  # 0-dim, times the loss scale
        return norm

    def _note_norm_groups(self) -> Any:
        groups = self._compute_norm()
        norms = torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in groups])  # [groups]
        # DeepSpeed reports -1 for a group whose norm is not finite; squared, it would look like 1
        norms = torch.where(norms >= 0, norms, torch.inf)
        self._scaled_norm = torch.linalg.vector_norm(norms)  # 0-dim
        return groups

    def _decide(self, has_overflow: bool = False) -> None:
        """Replace `_update_scale`: update the scale, then clip or skip.

        Args:
            has_overflow: Whether DeepSpeed itself skips the step.
        """
        scaled, self._scaled_norm, self._skipped_norm = self._scaled_norm, None, None
        # read before the update below, which may change it: these gradients have the old scale
        scale = self._hooked.loss_scale
        self._update_scale(has_overflow)
        # an overflow detected before the norm leaves no norm; one detected in the norm makes it NaN or inf
        norm = torch.tensor(torch.inf) if has_overflow or scaled is None else scaled / scale  # 0-dim
        self._clip(norm)
        if self.guard is None:
            return
        if has_overflow or scaled is None:
            self.guard.judge(norm)  # called every step, so that its statistics include this one
            # without a dynamic loss scaler, an overflow is a spike
            self._num_skipped += not self._hooked.dynamic_loss_scale
            return
        if bool(self.guard.judge(norm)):
            self._hooked.overflow = True  # checked after `_update_scale`: DeepSpeed then returns without an update
            self._num_skipped += 1
            self._skipped_norm = norm

    def _clip(self, norm: Tensor) -> None:
        self.clip_threshold = torch.full_like(norm, self._fixed_limit)  # 0-dim
        if self.clipping is not None:
            self.clip_threshold = torch.minimum(self.clip_threshold, self.clipping.limit(norm))
            limit = float(self.clip_threshold)
            self._hooked.clip_grad = limit if limit < torch.inf else 0.0

    @property
    def grad_norm(self) -> Tensor | None:
        """Global norm before clipping in the last optimizer step, 0-dim; None before the first step."""
        if self._skipped_norm is not None:
            return self._skipped_norm
        norm = self.deepspeed_engine.get_global_grad_norm()
        return None if norm is None else torch.as_tensor(norm, dtype=torch.float32)

    @property
    def num_overflows(self) -> int:
        """Number of optimizer steps skipped because a scaled gradient was not finite."""
        return int(self.deepspeed_engine.skipped_steps) - self._num_skipped


# In-memory train state of a ZeRO optimizer: master weights, optimizer state and low-precision weights. It is iterated
# over by reference, one sub-group at a time where state is on disk, without collectives.

_COUNTERS = ("global_steps", "global_samples", "micro_steps")


class TrainStateMixin:
    """Gives snapshots access to the train state of a strategy."""

    optimizers: list[Any]
    lightning_module: Any
    deepspeed_engine: Any

    def live_tensors(self, *, writes_back: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor that a step changes, with its name.

        Args:
            writes_back: Whether the caller overwrites the tensors; low-precision weights are then refreshed from the
                master weights.
        """
        optimizer, module = self.optimizers[0], self.lightning_module
        if is_stage_3(optimizer):
            yield from _stage_3(optimizer, module, writes_back=writes_back)
        else:
            yield from _stages_1_and_2(optimizer, module)
        persistent = module.state_dict(keep_vars=True)
        for name, buffer in module.named_buffers():
            if name in persistent:
                yield f"buffer/{name}", buffer

    def forget_tensors(self, names: list[str]) -> None:
        """Remove optimizer state that was created after a snapshot.

        Args:
            names: Names from `live_tensors`.
        """
        flats = flat_weights(self.optimizers[0])
        for name in names:
            kind, _, rest = name.partition("/")
            if kind == "moment":
                moment, _, index = rest.rpartition("/")
                self.optimizers[0].optimizer.state[flats[int(index)]].pop(moment)

    def live_scalars(self) -> dict[str, Any]:
        """Return the non-tensor state: the engine's counters, integer step counts, the loss scale."""
        optimizer = self.optimizers[0]
        return {
            "engine": {name: getattr(self.deepspeed_engine, name) for name in _COUNTERS},
            "scaler": copy.deepcopy(vars(optimizer.loss_scaler)),
            "counts": [_counts(optimizer, flat) for flat in flat_weights(optimizer)],
        }

    def restore_scalars(self, numbers: dict[str, Any]) -> None:
        """Restore the scalars that `live_scalars` returned."""
        optimizer = self.optimizers[0]
        for name, value in numbers["engine"].items():
            setattr(self.deepspeed_engine, name, value)
        vars(optimizer.loss_scaler).update(numbers["scaler"])
        for flat, counts in zip(flat_weights(optimizer), numbers["counts"], strict=True):
            if counts:
                optimizer.optimizer.state[flat].update(counts)
        if type(optimizer.optimizer).__name__ == "DeepSpeedCPUAdam":
            advance_step_count(optimizer.optimizer, numbers["counts"][0]["step"])


def _stages_1_and_2(optimizer: Any, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for index, flat in enumerate(optimizer.single_partition_of_fp32_groups):
        yield f"master/{index}", flat.data
        yield from _moments(optimizer, flat, index)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:  # frozen weights under an adapter never change
            yield f"weight/{name}", parameter.data


def _stage_3(optimizer: Any, module: nn.Module, *, writes_back: bool) -> Iterator[tuple[str, Tensor]]:
    for index in range(len(optimizer.fp16_groups)):
        with in_memory(optimizer, index, writes_back=writes_back) as flat:
            yield f"master/{index}", flat.data
            yield from _moments(optimizer, flat, index)
            if writes_back:
                # after the caller has overwritten the master weights, before they leave memory
                optimizer._reassign_or_swap_out_partitioned_parameters(index)
    parameters: Iterator[tuple[str, Any]] = module.named_parameters()
    for name, parameter in parameters:
        # small parameters stay gathered; the loop above does not refresh that copy
        if parameter.requires_grad and parameter.numel() == parameter.ds_numel:
            yield f"weight/{name}", parameter.data


def _moments(optimizer: Any, flat: Tensor, index: int) -> Iterator[tuple[str, Tensor]]:
    for name, value in optimizer.optimizer.state.get(flat, {}).items():
        if isinstance(value, Tensor):
            yield f"moment/{name}/{index}", value


def _counts(optimizer: Any, flat: Tensor) -> dict[str, Any]:
    state = optimizer.optimizer.state.get(flat, {})
    return {key: value for key, value in state.items() if not isinstance(value, Tensor)}


@implements_engine
class DeepSpeedZero(StepGuardMixin, TrainStateMixin, PerRankSavingMixin, MeshRanksMixin, DeepSpeedStrategy):
    """Lightning's DeepSpeed strategy as a `recipes.engine.Engine`, on GPUs and on CPUs.

    Mixed precision uses torch's autocast over float32 weights, as under every other strategy; `bf16-true` uses
    DeepSpeed's bfloat16 weights with a float32 master copy.

    Args:
        devices: Devices of this node, one per rank.
        precision: Dtypes of weights and matmuls.
        checkpoint_io: Writes and reads checkpoints; None uses Lightning's default.
        mesh: Mesh of shards and context-parallel ranks; None makes every rank data-parallel.
        stage: 1 partitions optimizer state, 2 also gradients, 3 also weights.
        offload_optimizer: Storage for optimizer state; DeepSpeedCPUAdam then steps in host memory. None keeps it on
            the device.
        offload_parameters: Storage for weights between uses, at stage 3; None keeps them on the device.
        nvme_path: Folder for offloading to `nvme`.
        gather_for_generation: At stage 3, `per_call` gathers the weights once for a batch of texts; each rank then
            holds the full model. `per_token` gathers them for every token. `auto` is `per_call` where that fits into
            the free memory of all devices, as is None, for the stages that gather nothing.
    """

    option: ClassVar[str] = "deepspeed_stage_{stage}"
    clips_by_value: ClassVar[bool] = False
    state_layout: ClassVar[str] = "zero"
    steps_one_optimizer: ClassVar[bool] = True
    accepts_device_list: ClassVar[bool] = False  # each rank uses the GPU of its local rank

    frees_gradients = True

    def __init__(
        self,
        *,
        devices: Sequence[torch.device],
        precision: Precision,
        checkpoint_io: CheckpointIO | None = None,
        mesh: Mesh | None = None,
        stage: Literal[1, 2, 3],
        offload_optimizer: Literal["cpu", "nvme"] | None,
        offload_parameters: Literal["cpu", "nvme"] | None,
        nvme_path: str | None,
        gather_for_generation: Literal["auto", "per_call", "per_token"] | None = None,
    ) -> None:
        self._configured_mesh = mesh
        on_gpu = devices[0].type == "cuda"
        if not on_gpu:
            os.environ["DS_ACCELERATOR"] = "cpu"
            # otherwise stage 3 starts `numactl` for every gradient bucket to count devices (0.19.8, CPU_Accelerator)
            os.environ["LOCAL_SIZE"] = str(len(devices))
        # ninja, which builds DeepSpeedCPUAdam, is looked up on PATH; it is next to this Python, even if not activated
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        super().__init__(
            stage=stage,
            offload_optimizer=offload_optimizer is not None,
            offload_optimizer_device=offload_optimizer or "none",
            offload_parameters=offload_parameters is not None,
            offload_params_device=offload_parameters or "none",
            nvme_path=nvme_path or "",
            pin_memory=on_gpu,
            overlap_comm=on_gpu,
            sub_group_size=DISK_SUB_GROUP if "nvme" in (offload_optimizer, offload_parameters) else 10**12,
            logging_level=logging.WARNING,
            precision_plugin=ZeroPrecision(precision, devices[0]),
            process_group_backend=None if on_gpu else "gloo",
        )
        if checkpoint_io is not None:
            self.checkpoint_io = checkpoint_io
        assert isinstance(self.config, dict), "Lightning builds it from the arguments above"
        # otherwise DeepSpeed rejects every offloaded optimizer except DeepSpeedCPUAdam, such as SGD
        self.config["zero_force_ds_cpu_optimizer"] = False
        self.config |= to_deepspeed_config(precision)
        # Lightning's `thread_count` sets a name that DeepSpeed 0.19.8 does not read
        self.config["aio"]["intra_op_parallelism"] = DISK_THREADS
        self._offload_optimizer = offload_optimizer
        self._gather_for_generation: Literal["auto", "per_call", "per_token"] = gather_for_generation or "auto"
        self._uses_disk = "nvme" in (offload_optimizer, offload_parameters)
        self._precision = precision
        self._state = ZeroState()

    @property
    @override
    def gathers_by_hooks(self) -> bool:
        """Whether hooks that torch.compile cannot trace gather the weights."""
        assert isinstance(self.config, dict)
        return bool(self.config["zero_optimization"]["stage"] == 3)

    @override
    def setup_environment(self) -> None:
        """Skip Lightning's check, which rejects CPUs (#12607, 2.6.6): DeepSpeed runs on them with gloo."""
        DDPStrategy.setup_environment(self)
        self.connect_ranks()

    @override
    def setup_distributed(self) -> None:
        """Join the process group through DeepSpeed.

        On a CPU it would first compile a shared-memory all-reduce; gloo, which every strategy uses, is sufficient.
        """
        if self.root_device.type == "cpu":
            backend: Any = importlib.import_module("deepspeed.comm.torch")
            assert callable(backend.build_shm_op), "DeepSpeed's backend calls it first"
            backend.build_shm_op = lambda: None
        reset_seed()  # as DDP does: a module of one's own then draws the same numbers under both
        join_deepspeed_process_group(self)

    @override
    def _set_node_environment_variables(self) -> None:
        """Set LOCAL_RANK, from which DeepSpeed selects the GPU: 0 if each rank sees only one GPU."""
        super()._set_node_environment_variables()
        if self.root_device.type == "cuda":
            os.environ["LOCAL_RANK"] = str(self.root_device.index)

    @property
    @override
    def root_device(self) -> torch.device:
        """Device of this rank; on a CPU its index is the rank, because DeepSpeed compares it with 0."""
        assert self.parallel_devices is not None
        device = self.parallel_devices[self.local_rank]
        return device if device.type == "cuda" else torch.device("cpu", self.local_rank)

    @override
    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Do not partition yet: the model is still on the meta device, and `materialize` partitions it."""
        yield

    def materialize(
        self, model: nn.Module, initialize: Callable[[nn.Module], None], *, is_trained: bool = True
    ) -> nn.Module:
        """Allocate and initialize the model; at stage 3 one parameter at a time, so that no rank holds it unsharded."""
        if self.groups.context is not None:
            apply_context_parallel(model, self.groups.context)
        if self._uses_disk:
            from deepspeed.ops.op_builder import AsyncIOBuilder

            load_op(AsyncIOBuilder())  # before DeepSpeed itself would load it
        assert isinstance(self.config, dict)
        if is_trained:
            fit_buckets(self.config["zero_optimization"], model)
        if self.config["zero_optimization"]["stage"] < 3:
            model.to_empty(device=self._communication_device)
            initialize(model)
        else:
            assert is_trained, "the config check rejects ZeRO-3 beside a frozen model"
            gather_whole(get_blocks(model, "deepspeed_stage_3"))
            # `zero.Init` reads the batch size and precision, which Lightning fills in later
            complete_deepspeed_config(self)
            partition(model, initialize, config=self.config, device=self._communication_device)
            gather_where_read(model)
        return model

    @override
    @contextmanager
    def _hold_whole_weights(self) -> Iterator[bool]:
        if not self.gathers_by_hooks:
            yield True
            return
        assert self.lightning_module is not None
        parameters: list[Any] = list(self.lightning_module.model.parameters())
        num_bytes = sum(parameter.ds_numel * parameter.element_size() for parameter in parameters)
        if not self._gathers_once(self._gather_for_generation, num_bytes=num_bytes):
            yield False
            return
        with keep_gathered(parameters):
            yield True

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Replace an offloaded Adam or AdamW with DeepSpeedCPUAdam, which is compiled on first use.

        Raises:
            ConfigError: The optimizer gives other weights where they are laid end to end.
        """
        check_flat_weights(optimizer)
        self._state.remember(optimizer)
        is_adam = isinstance(optimizer, torch.optim.Adam)  # AdamW is a subclass
        if self._offload_optimizer is None or not is_adam:
            return optimizer
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        from deepspeed.ops.op_builder import CPUAdamBuilder

        load_op(CPUAdamBuilder())  # before the constructor below would load it
        group = optimizer.param_groups[0]
        cpu_adam: torch.optim.Optimizer = DeepSpeedCPUAdam(
            optimizer.param_groups,
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            adamw_mode=isinstance(optimizer, torch.optim.AdamW),
        )
        return cpu_adam

    @override
    def init_deepspeed(self) -> None:
        """Start the engine, with DeepSpeed's own loss scaler for float16 under autocast.

        Otherwise DeepSpeed 0.19.8 puts a torch GradScaler into each rank's optimizer, which clips before it
        unscales and does not share the overflow flag: ranks would skip different steps.
        """
        super().init_deepspeed()
        if not self.optimizers:
            return
        optimizer: Any = self.optimizers[0]
        optimizer.torch_autocast_gradscaler = None
        if self._precision.scales_loss:
            attach_scaler(optimizer)
        assert isinstance(self.config, dict)
        if self._precision.is_mixed and self.config["zero_optimization"]["stage"] == 3:
            assert self.lightning_module is not None
            blocks = get_blocks(self.lightning_module.model, "deepspeed_stage_3")
            gather_in_compute_dtype(blocks, optimizer, self._precision.compute_dtype)
        # after the scaler: the guard must be the outer wrapper of `_update_scale`, or it would decide after the update
        self.hook_into(optimizer)

    @override
    def teardown(self) -> None:
        """Tear down without copying the state to the host."""
        with state_left_on_device(self):
            super().teardown()

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass without DeepSpeed's division by the number of accumulation steps.

        Lightning has already divided by it (#6170, 2.6.6). Lightning also decides when an accumulation window ends, so
        both count the same optimizer steps.
        """
        assert self.lightning_module is not None
        ends_window = not is_accumulating(self.lightning_module.trainer)
        self.deepspeed_engine.set_gradient_accumulation_boundary(ends_window)
        return super().backward(closure_loss, *args, scale_wrt_gas=False, **kwargs)

    def clip_gradients(
        self, parameters: Iterable[nn.Parameter], *, max_norm: float | None, max_value: float | None
    ) -> None:
        """Only check the limit: DeepSpeed clips inside its step, using `gradient_clipping` from its config."""
        assert isinstance(self.config, dict)
        assert max_value is None, "the config check rejects clipping by value"
        assert self.config["gradient_clipping"] == (max_norm or 0.0)

    def scale_loss(self, value: Tensor) -> Tensor:
        """Return a tensor times the loss scale."""
        return value if self.current_loss_scale is None else value * self.current_loss_scale

    @property
    def current_loss_scale(self) -> float | None:
        """Current loss scale; None without a loss scaler."""
        optimizer: Any = self.optimizers[0]
        return float(optimizer.loss_scale) if self._precision.scales_loss else None

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return this rank's shards of the weights."""
        assert self.lightning_module is not None
        return self._state.model(self.lightning_module, writes_unsharded=self.is_global_zero)

    @override
    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return this rank's shards of the optimizer state."""
        return self._state.optimizer(self.optimizers[0], writes_unsharded=self.is_global_zero)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save with the loss scale, under the key that Lightning's mixed precision uses in every other strategy."""
        if self._precision.scales_loss:
            checkpoint |= {MixedPrecision.__qualname__: scaler_state(self.optimizers[0])}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the state, with its tensors still on disk, and restore the loss scale."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self._precision.scales_loss and MixedPrecision.__qualname__ in checkpoint:
            load_scaler_state(self.optimizers[0], checkpoint[MixedPrecision.__qualname__])
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Load this rank's shards of the weights and master weights."""
        assert self.lightning_module is not None
        self._state.load_model(self.lightning_module, checkpoint["state_dict"])

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load this rank's shards of the optimizer state."""
        self._state.load_optimizer(self.optimizers[0], self.read_optimizer_state(checkpoint))


# Loss scaling for float16 autocast inside a ZeRO optimizer, with the state of torch.amp.GradScaler.

# torch.amp.GradScaler's defaults
INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000  # steps without an overflow after which the scale doubles


def attach_scaler(optimizer: Any) -> None:
    """Make a ZeRO optimizer scale the loss, unscale before clipping, and skip overflows on all ranks together.

    Args:
        optimizer: DeepSpeed's optimizer.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    optimizer.loss_scaler = DynamicLossScaler(
        init_scale=INITIAL_SCALE,
        scale_window=GROWTH_INTERVAL,
        min_scale=2.0**-14,
        delayed_shift=1,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=False,
        dtype=torch.half,
    )
    optimizer.dynamic_loss_scale = True
    _grow_after_the_step(optimizer)


def _grow_after_the_step(optimizer: Any) -> None:
    """Grow the scale after the update instead of before it.

    DeepSpeed 0.19.8 doubles it between computing the norm and updating, so gradients scaled by the old scale are
    divided by the new one: the update is halved wherever clipping does not act.
    """
    step, update_scale = optimizer.step, optimizer._update_scale
    is_updated = True

    def update_only_on_overflow(has_overflow: bool = False) -> None:
        nonlocal is_updated
        is_updated = has_overflow
        if has_overflow:  # the step is skipped, so no gradient is unscaled
            update_scale(has_overflow)

    def step_then_grow(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_updated
        result = step(*args, **kwargs)
        if not is_updated:
            is_updated = True
            update_scale(False)
        return result

    optimizer._update_scale, optimizer.step = update_only_on_overflow, step_then_grow


def scaler_state(optimizer: Any) -> dict[str, Any]:
    """Return the state in the format of `GradScaler.state_dict`: the scale, and the steps since it last changed."""
    scaler = optimizer.loss_scaler
    return {
        "scale": scaler.cur_scale,
        "growth_factor": scaler.scale_factor,
        "backoff_factor": 1 / scaler.scale_factor,
        "growth_interval": scaler.scale_window,
        "_growth_tracker": (scaler.cur_iter - scaler.last_overflow_iter - 1) % scaler.scale_window,
    }


def load_scaler_state(optimizer: Any, state: dict[str, Any]) -> None:
    """Restore a saved scale and step count."""
    scaler = optimizer.loss_scaler
    scaler.cur_scale = state["scale"]
    # DeepSpeed counts from the last overflow; if that is -1, `cur_iter` equals GradScaler's growth tracker
    scaler.cur_iter, scaler.last_overflow_iter = state["_growth_tracker"], -1


# ZeRO lays the weights of a group end to end and gives a rank a part of that. An optimizer that computes each number by
# itself never knows; one with a norm per tensor, such as LARS or LAMB, would compute that of many tensors, in silence.

_BY_NUMBER = {"SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "ASGD", "RMSprop", "Rprop"}
_CHECKED_ELSEWHERE = {"recipes", "torchao", "deepspeed"}  # optimizers of conf/, which the config check knows


def check_flat_weights(optimizer: torch.optim.Optimizer) -> None:
    """Try an optimizer that is not known on two small tensors, and on the same numbers in one.

    Raises:
        ConfigError: The numbers differ.
    """
    kind = type(optimizer)
    if kind.__module__.partition(".")[0] in _CHECKED_ELSEWHERE:
        return
    if kind.__module__.startswith("torch.optim") and kind.__name__ in _BY_NUMBER:
        return
    try:
        apart, together = (_try_steps(optimizer, joined=joined) for joined in (False, True))
    except Exception as error:  # of somebody else's class, which may need more than parameters and gradients
        LOGGER.warning(
            f"ZeRO gives {kind.__name__} all weights end to end, and it could not be tried on such ones ({error}):"
            " if it computes norms of tensors, type strategy=fsdp, or ddp"
        )
        return
    if not torch.allclose(apart, together, rtol=1e-4, atol=0):
        raise ConfigError(
            f"strategy=deepspeed_… optimizer {kind.__name__}",
            "it computes with whole tensors, such as their norms, and ZeRO gives it all weights end to end",
            "strategy=fsdp, or ddp",
        )


def _try_steps(optimizer: torch.optim.Optimizer, *, joined: bool) -> Tensor:
    """Return 17 numbers after three steps of a copy, in tensors of 3 x 4 and 5 whose sizes differ, or in one tensor."""
    draws = torch.Generator().manual_seed(0)
    scale = torch.cat([torch.ones(12), torch.full((5,), 100.0)])
    numbers = torch.randn(17, generator=draws) * scale
    gradients = torch.randn(3, 17, generator=draws)
    parts = [numbers] if joined else [numbers[:12].view(3, 4), numbers[12:]]
    weights = [nn.Parameter(part.clone()) for part in parts]
    kind, tried = type(optimizer), copy.copy(optimizer)
    tried.state = defaultdict(dict)
    tried._optimizer_step_pre_hooks, tried._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    rate = {"lr": 0.1} if "lr" in optimizer.defaults else {}  # a warm-up begins at 0
    tried.param_groups = [{**optimizer.param_groups[0], **rate, "params": weights}]
    with torch.random.fork_rng():
        for gradient in gradients:
            for weight, part in zip(weights, gradient.split([each.numel() for each in weights]), strict=True):
                weight.grad = part.view_as(weight).clone()
            kind.step(tried)  # not that of the copy, which a scheduler has bound to the original
    return torch.cat([weight.detach().flatten() for weight in weights])
