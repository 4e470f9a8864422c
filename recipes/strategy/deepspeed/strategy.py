"""DeepSpeed ZeRO 1-3 through Lightning: optimizer state, then gradients, then weights are divided over ranks."""

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

from recipes.checkpoint.shards import PerRankSavingMixin
from recipes.numerics.collectives import sum_over_ranks
from recipes.precision import Precision
from recipes.strategy import get_blocks
from recipes.strategy.deepspeed.checkpoint import ZeroState
from recipes.strategy.deepspeed.loss_scale import attach_scaler, load_scaler_state, scaler_state
from recipes.strategy.deepspeed.partition import fit_buckets, partition
from recipes.strategy.deepspeed.step_guard import StepGuardMixin, ZeroStepGuard
from recipes.strategy.deepspeed.train_state import TrainStateMixin
from recipes.strategy.precision_plugin import ZeroPrecision


class DeepSpeedZero(StepGuardMixin, TrainStateMixin, PerRankSavingMixin, DeepSpeedStrategy):
    """Lightning's DeepSpeed strategy, answering the questions of `recipes.strategy.Engine`, on a GPU and on a CPU.

    The mixed precisions are torch's autocast over float32 weights, as under every other strategy; `bf16-true` is
    DeepSpeed's own engine: bfloat16 weights with a float32 master copy.

    Args:
        devices: Of this node, one a rank.
        precision: Of weights and products.
        checkpoint_io: How checkpoints are written and read.
        stage: 1 divides optimizer state; 2 also gradients; 3 also weights.
        offload_optimizer: Where optimizer state lives and steps, with DeepSpeedCPUAdam; None: on the device.
        offload_parameters: Where weights live between uses, at stage 3; None: on the device.
        nvme_path: Folder on the disk that `nvme` means.
    """

    option: ClassVar[str] = "deepspeed_stage_{stage}"
    clips_by_value: ClassVar[bool] = False
    accepts_device_list: ClassVar[bool] = False  # the GPU of a rank is its number on the node

    frees_gradients = True

    def __init__(
        self,
        *,
        devices: Sequence[torch.device],
        precision: Precision,
        checkpoint_io: CheckpointIO | None = None,
        stage: Literal[1, 2, 3],
        offload_optimizer: Literal["cpu", "nvme"] | None,
        offload_parameters: Literal["cpu", "nvme"] | None,
        nvme_path: str | None,
    ) -> None:
        on_gpu = devices[0].type == "cuda"
        if not on_gpu:
            os.environ["DS_ACCELERATOR"] = "cpu"
        # ninja, which builds DeepSpeedCPUAdam, lies beside the Python that runs, activated or not
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
            logging_level=logging.WARNING,
            precision_plugin=ZeroPrecision(precision, devices[0]),
            process_group_backend=None if on_gpu else "gloo",
        )
        if checkpoint_io is not None:
            self.checkpoint_io = checkpoint_io
        assert isinstance(self.config, dict), "made by Lightning from the arguments above"
        self.config["zero_force_ds_cpu_optimizer"] = False  # SGD has no DeepSpeed form
        if precision.compute_dtype != precision.param_dtype:
            self.config["torch_autocast"] = {
                "enabled": True,
                "dtype": str(precision.compute_dtype).removeprefix("torch."),
                "lower_precision_safe_modules": [],  # gathered and reduced in float32
            }
        self._offload_optimizer = offload_optimizer
        self._precision = precision
        self._state = ZeroState()

    def setup_environment(self) -> None:
        """DeepSpeed runs on a CPU with gloo; Lightning's own check says it cannot (#12607, 2.6.6)."""
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        """Join the process group, through DeepSpeed.

        On a CPU it would first compile a shared-memory all-reduce; gloo, which every strategy uses, is enough.
        """
        if self.root_device.type == "cpu":
            backend: Any = importlib.import_module("deepspeed.comm.torch")
            assert callable(backend.build_shm_op), "what the engine's backend calls first"
            backend.build_shm_op = lambda: None
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @property
    def root_device(self) -> torch.device:
        """This rank's device; on a CPU it carries the rank, which DeepSpeed compares with 0."""
        assert self.parallel_devices is not None
        device = self.parallel_devices[self.local_rank]
        return device if device.type == "cuda" else torch.device("cpu", self.local_rank)

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Nothing is partitioned while the model is described on the meta device."""
        yield

    def place(self, model: nn.Module, initialize: Callable[[nn.Module], None]) -> None:
        """At stage 3 each parameter is made, filled and partitioned before the next one: no rank holds the model."""
        assert isinstance(self.config, dict)
        fit_buckets(self.config["zero_optimization"], model)
        if self.config["zero_optimization"]["stage"] < 3:
            model.to_empty(device=_device_alone(self.root_device))
            initialize(model)
        else:
            get_blocks(model, "deepspeed_stage_3")
            self._init_config_if_needed()
            partition(model, initialize, config=self.config, device=_device_alone(self.root_device))

    def own_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Adam and AdamW in host memory step with DeepSpeedCPUAdam, built when first used."""
        self._state.remember(optimizer)
        adam = isinstance(optimizer, torch.optim.Adam)  # AdamW is one
        if self._offload_optimizer is None or not adam:
            return optimizer
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        group = optimizer.param_groups[0]
        own: torch.optim.Optimizer = DeepSpeedCPUAdam(
            optimizer.param_groups,
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            adamw_mode=isinstance(optimizer, torch.optim.AdamW),
        )
        return own

    def init_deepspeed(self) -> None:
        """Start the engine; the loss scaler of float16 is DeepSpeed's, over autocast.

        DeepSpeed 0.19.8 would put a torch GradScaler into each rank's optimizer instead, which clips before it
        unscales and does not share the overflow flag.
        """
        super().init_deepspeed()
        if not self.optimizers:
            return
        optimizer: Any = self.optimizers[0]
        optimizer.torch_autocast_gradscaler = None
        if self._precision.scales_loss:
            attach_scaler(optimizer)
        self._step_guard = ZeroStepGuard(optimizer)

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Lightning has divided by the passes of the window; DeepSpeed must not divide again (#6170, 2.6.6).

        The boundary is Lightning's, so that both count the same optimizer steps.
        """
        assert self.lightning_module is not None
        within = self.lightning_module.trainer.fit_loop._should_accumulate()
        self.deepspeed_engine.set_gradient_accumulation_boundary(not within)
        return super().backward(closure_loss, *args, scale_wrt_gas=False, **kwargs)

    def clip_gradients(
        self, parameters: Iterable[nn.Parameter], *, max_norm: float | None, max_value: float | None
    ) -> None:
        """DeepSpeed clips by `gradient_clipping` of its config, inside its step."""
        assert isinstance(self.config, dict)
        assert max_value is None, "the config check refuses clipping by value"
        assert self.config["gradient_clipping"] == (max_norm or 0.0)

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Add a tensor over all ranks."""
        return sum_over_ranks(value, _device_alone(self.root_device))

    @property
    def current_loss_scale(self) -> float | None:
        """What the loss is multiplied by; None without a loss scaler."""
        optimizer: Any = self.optimizers[0]
        return float(optimizer.loss_scale) if self._precision.scales_loss else None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's parts of the weights."""
        assert self.lightning_module is not None
        return self._state.model(self.lightning_module, writes_whole=self.is_global_zero)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """This rank's parts of the moments."""
        return self._state.optimizer(self.optimizers[0], writes_whole=self.is_global_zero)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """The loss scale goes under the name that Lightning's mixed precision gives it."""
        if self._precision.scales_loss:
            checkpoint |= {MixedPrecision.__qualname__: scaler_state(self.optimizers[0])}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """State whose tensors are still on disk; the loss scale goes on."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self._precision.scales_loss and MixedPrecision.__qualname__ in checkpoint:
            load_scaler_state(self.optimizers[0], checkpoint[MixedPrecision.__qualname__])
        return checkpoint

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Into this rank's part of the weights and of their master copy."""
        assert self.lightning_module is not None
        self._state.load_model(self.lightning_module, checkpoint["state_dict"])

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Into this rank's part of the moments."""
        self._state.load_optimizer(self.optimizers[0], checkpoint["optimizer_states"][0])


def _device_alone(device: torch.device) -> torch.device:
    """Tensors of a CPU lie on `cpu`, whatever its number."""
    return device if device.type == "cuda" else torch.device("cpu")
