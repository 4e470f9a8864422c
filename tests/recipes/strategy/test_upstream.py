"""What our strategies undo is still there: a test that fails here says that a workaround can go."""

import inspect

from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector


def test_lightning_still_lets_deepspeed_divide_by_the_passes_a_second_time() -> None:
    """#6170, `Zero.backward`."""
    from deepspeed.runtime import engine

    assert "def backward(self, loss, retain_graph=False, scale_wrt_gas=True)" in inspect.getsource(
        engine
    )
    assert "scale_wrt_gas" not in inspect.getsource(DeepSpeedPrecision)
    assert "scale_wrt_gas" not in inspect.getsource(DeepSpeedStrategy)


def test_lightning_still_calls_the_hooks_of_a_step_for_every_micro_batch_under_deepspeed() -> None:
    """#19350, `ZeroPrecision._after_closure`."""
    assert "_should_accumulate" not in inspect.getsource(DeepSpeedPrecision.optimizer_step)


def test_lightning_still_refuses_deepspeed_on_a_cpu() -> None:
    """#12607, `Zero.setup_environment`."""
    assert "only supported on CUDA GPUs" in inspect.getsource(DeepSpeedStrategy.setup_environment)


def test_lightning_still_broadcasts_before_every_micro_batch() -> None:
    """#21487, `build._without_collectives_for_signals`."""
    source = inspect.getsource(_TrainingEpochLoop.advance)
    assert "self._broadcast_sigterm_tensor()" in source
    assert "every_n" not in source


def test_lightning_still_broadcasts_inside_its_signal_handler() -> None:
    """2.6.6, `build._without_collectives_for_signals`."""
    assert "dist.broadcast(" in inspect.getsource(_SignalConnector._sigterm_notifier_fn)


def test_deepspeed_still_links_moments_when_only_the_first_group_has_any() -> None:
    """0.19.8, `recipes.checkpoint.zero._link`."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    source = inspect.getsource(DeepSpeedZeroOptimizer._optimizer_step)
    assert "_lazy_init_hp_params_optimizer_state()" in source


def test_deepspeed_still_gives_each_rank_a_scaler_of_its_own_under_autocast() -> None:
    """0.19.8, `Zero.init_deepspeed`."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    source = inspect.getsource(DeepSpeedZeroOptimizer._optimizer_step)
    assert "self.torch_autocast_gradscaler.step(self.optimizer)" in source
