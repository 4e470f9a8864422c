"""DeepSpeed ZeRO 1 to 3: partition optimizer state, then gradients, then weights over ranks."""

import importlib
import logging
import os
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.strategies.ddp import DDPStrategy
from torch import Tensor, nn
from typing_extensions import override

from recipes.checkpoint.shards import PerRankSavingMixin
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
from recipes.strategy.deepspeed.checkpoint import ZeroState
from recipes.strategy.deepspeed.compiled_op import load_op
from recipes.strategy.deepspeed.loss_scale import attach_scaler, load_scaler_state, scaler_state
from recipes.strategy.deepspeed.partition import (
    DISK_SUB_GROUP,
    DISK_THREADS,
    fit_buckets,
    gather_in_compute_dtype,
    gather_whole,
    partition,
)
from recipes.strategy.deepspeed.step_guard import StepGuardMixin
from recipes.strategy.deepspeed.train_state import TrainStateMixin
from recipes.strategy.mesh_ranks import MeshRanksMixin
from recipes.strategy.precision_plugin import ZeroPrecision


class DeepSpeedZero(StepGuardMixin, TrainStateMixin, PerRankSavingMixin, MeshRanksMixin, DeepSpeedStrategy):
    """Lightning's DeepSpeed strategy as a `recipes.strategy.Engine`, on GPUs and on CPUs.

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
    """

    option: ClassVar[str] = "deepspeed_stage_{stage}"
    clips_by_value: ClassVar[bool] = False
    state_layout: ClassVar[str] = "zero"
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
        self._uses_disk = "nvme" in (offload_optimizer, offload_parameters)
        self._precision = precision
        self._state = ZeroState()

    @property
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

    def materialize(self, model: nn.Module, initialize: Callable[[nn.Module], None]) -> nn.Module:
        """Allocate and initialize the model; at stage 3 one parameter at a time, so that no rank holds it unsharded."""
        if self.groups.context is not None:
            apply_context_parallel(model, self.groups.context)
        if self._uses_disk:
            from deepspeed.ops.op_builder import AsyncIOBuilder

            load_op(AsyncIOBuilder())  # before DeepSpeed itself would load it
        assert isinstance(self.config, dict)
        fit_buckets(self.config["zero_optimization"], model)
        if self.config["zero_optimization"]["stage"] < 3:
            model.to_empty(device=self._communication_device)
            initialize(model)
        else:
            gather_whole(get_blocks(model, "deepspeed_stage_3"))
            # `zero.Init` reads the batch size and precision, which Lightning fills in later
            complete_deepspeed_config(self)
            partition(model, initialize, config=self.config, device=self._communication_device)
        return model

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Replace an offloaded Adam or AdamW with DeepSpeedCPUAdam, which is compiled on first use."""
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
            blocks = get_blocks(self.lightning_module.model, "deepspeed_stage_3")  # type: ignore[arg-type]
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
