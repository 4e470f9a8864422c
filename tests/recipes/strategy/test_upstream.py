"""The upstream bugs that our strategies work around still exist: if a test fails, its workaround can go."""

import inspect
import subprocess
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import DeepSpeedPrecision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from torch.nn.parallel import DistributedDataParallel

from recipes.strategy.deepspeed.compiled_op import load_op


def test_lightning_still_lets_deepspeed_divide_by_the_accumulation_steps_a_second_time() -> None:
    """#6170, `DeepSpeedZero.backward`."""
    from deepspeed.runtime import engine

    assert "def backward(self, loss, retain_graph=False, scale_wrt_gas=True)" in inspect.getsource(engine)
    assert "scale_wrt_gas" not in inspect.getsource(DeepSpeedPrecision)
    assert "scale_wrt_gas" not in inspect.getsource(DeepSpeedStrategy)


def test_lightning_still_calls_the_hooks_of_a_step_for_every_micro_batch_under_deepspeed() -> None:
    """#19350, `ZeroPrecision._after_closure`."""
    assert "_should_accumulate" not in inspect.getsource(DeepSpeedPrecision.optimizer_step)


def test_lightning_still_rejects_deepspeed_on_a_cpu() -> None:
    """#12607, `DeepSpeedZero.setup_environment`."""
    assert "only supported on CUDA GPUs" in inspect.getsource(DeepSpeedStrategy.setup_environment)


def test_lightning_still_broadcasts_before_every_micro_batch() -> None:
    """#21487, `lightning_internals.disable_signal_handling`."""
    source = inspect.getsource(_TrainingEpochLoop.advance)
    assert "self._broadcast_sigterm_tensor()" in source
    assert "every_n" not in source


def test_lightning_still_broadcasts_inside_its_signal_handler() -> None:
    """2.6.6, `lightning_internals.disable_signal_handling`."""
    assert "dist.broadcast(" in inspect.getsource(_SignalConnector._sigterm_notifier_fn)


def test_lightning_still_wraps_ddp_on_a_stream_of_its_own() -> None:
    """#21567, `DDP._setup_model`."""
    assert "torch.cuda.stream(torch.cuda.Stream())" in inspect.getsource(DDPStrategy._setup_model)


def test_lightning_still_copies_the_state_to_the_host_when_a_run_ends() -> None:
    """2.6.6, `lightning_internals.state_left_on_device`."""
    source = inspect.getsource(Strategy.teardown)
    assert '_optimizers_to_device(self.optimizers, torch.device("cpu"))' in source
    assert "self.lightning_module.cpu()" in source


def test_deepspeed_still_links_optimizer_state_when_only_the_first_group_has_any() -> None:
    """0.19.8, `recipes.strategy.deepspeed.checkpoint._link`."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    source = inspect.getsource(DeepSpeedZeroOptimizer._optimizer_step)
    assert "_lazy_init_hp_params_optimizer_state()" in source


def test_deepspeed_still_gives_each_rank_a_scaler_of_its_own_under_autocast() -> None:
    """0.19.8, `DeepSpeedZero.init_deepspeed`."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    source = inspect.getsource(DeepSpeedZeroOptimizer._optimizer_step)
    assert "self.torch_autocast_gradscaler.step(self.optimizer)" in source


def test_deepspeed_still_pickles_its_loss_scaler_into_its_own_checkpoints() -> None:
    """0.19.8: `torch.load(..., weights_only=True)` rejects them; `strategy/deepspeed/checkpoint.py` writes tensors."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    assert "[LOSS_SCALER] = self.loss_scaler" in inspect.getsource(DeepSpeedZeroOptimizer.state_dict)


def test_deepspeed_still_starts_a_program_to_count_the_devices_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.19.8, `DeepSpeedZero.__init__`: 26 times a step at stage 3, unless LOCAL_SIZE says how many there are."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    started = []
    answer = b"available: 1 nodes (0)\nnode 0 cpus: 0 1\n"
    monkeypatch.setattr(subprocess, "check_output", lambda command: started.append(command) or answer)
    monkeypatch.setenv("LOCAL_SIZE", "2")
    assert CPU_Accelerator().device_count() == 2
    assert not started
    monkeypatch.delenv("LOCAL_SIZE")
    for _ in range(2):
        CPU_Accelerator().device_count()
    assert started == [["numactl", "--hardware"]] * 2


def test_deepspeed_still_needs_the_cuda_toolkit_for_disk_access_alone() -> None:
    """0.19.8, `recipes.config.check.deepspeed.check_toolchain`; its CPU Adam is built without."""
    from deepspeed.ops.op_builder import async_io
    from deepspeed.ops.op_builder.cpu import cpu_adam

    needed = 'os.path.join(torch.utils.cpp_extension.CUDA_HOME, "include")'
    assert needed in inspect.getsource(async_io.AsyncIOBuilder.include_paths)
    assert "CUDA_HOME" not in inspect.getsource(cpu_adam)


def test_deepspeed_still_ignores_the_number_of_threads_that_lightning_sets() -> None:
    """0.19.8 and 2.6.6, `DeepSpeedZero.__init__`."""
    from deepspeed.runtime.swap_tensor.aio_config import get_aio_config

    assert get_aio_config({"aio": {"thread_count": 4}})["intra_op_parallelism"] == 1


def test_deepspeed_cpu_adam_still_rounds_differently_where_steps_are_left_out() -> None:
    """0.19.8, `recipes.strategy.deepspeed.checkpoint.advance_step_count`: the last bit differs at some step."""
    from deepspeed.ops.op_builder import CPUAdamBuilder

    library = load_op(CPUAdamBuilder())

    def after(steps: range) -> float:
        weight = torch.zeros(1)
        library.create_adam(0, 1.0, 0.9, 0.999, 0.0, 0.0, True, False)
        for step in steps:
            moments = (torch.full((1,), 0.3), torch.full((1,), 0.7))
            weight.fill_(0.0)
            library.adam_update(0, step, 1.0, 0.9, 0.999, 1e-8, 0.0, True, weight, torch.ones(1), *moments)
        library.destroy_adam(0)
        return float(weight)

    assert any(after(range(1, n)) != after(range(n - 1, n)) for n in range(3, 300))


def test_torch_still_rebuilds_the_buckets_of_ddp_after_the_first_backward_pass(
    tmp_path: Path,
) -> None:
    """2.13, `DDP.setup`."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = DistributedDataParallel(torch.nn.Linear(3, 3))
        assert not model.reducer._rebuild_buckets()
        model(torch.ones(1, 3)).sum().backward()
        assert model.reducer._rebuild_buckets()
    finally:
        torch.distributed.destroy_process_group()
