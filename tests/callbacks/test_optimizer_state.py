"""OptimizerMonitor against the weights and the state of the optimizer, read by hand."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from callbacks import LossSpikeRollback, OptimizerMonitor


class ByHand(Callback):
    """Computes the same figures from all weights before and after each step."""

    def __init__(self) -> None:
        self.ratios: list[float] = []
        self.moments: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.before = torch.cat([p.detach().flatten() for p in pl_module.parameters()])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        after = torch.cat([p.detach().flatten() for p in pl_module.parameters()])
        self.ratios.append(float((after - self.before).norm() / after.norm()))
        states = trainer.optimizers[0].state.values()
        self.moments.append(float(torch.cat([state["exp_avg"].flatten() for state in states]).norm()))


@pytest.mark.parametrize("nan_at", [None, 3])
def test_update_ratio_and_moments_are_those_of_the_weights(
    plain_module: Any, make_trainer: Any, read_column: Any, nan_at: int | None
) -> None:
    class Adam(plain_module):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (torch.nan if batch_idx == nan_at else 1)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    by_hand = ByHand()
    monitors = [LossSpikeRollback(), OptimizerMonitor(per_block=True), by_hand]
    make_trainer(callbacks=monitors).fit(Adam())
    # by hand in float32, in the monitor in float64: an ulp or two of sums of 5 values
    assert read_column("optimizer/update_ratio") == pytest.approx(by_hand.ratios, rel=1e-5)
    assert read_column("optimizer/norm/exp_avg") == pytest.approx(by_hand.moments, rel=1e-5)
    assert read_column("optimizer/update_ratio/layer") == read_column("optimizer/update_ratio")
    assert [ratio == 0 for ratio in by_hand.ratios] == [number == nan_at for number in range(8)]


def test_only_logged_steps_cost_a_copy_and_state_without_moments_is_left_out(
    plain_module: Any, make_trainer: Any, read_column: Any
) -> None:
    class Copies(Callback):
        def __init__(self) -> None:
            self.held: list[int] = []

        def on_before_optimizer_step(self, *_: Any) -> None:
            self.held.append(len(monitor._before))

    monitor, copies = OptimizerMonitor(), Copies()
    make_trainer(callbacks=[monitor, copies], log_every_n_steps=4).fit(plain_module())
    assert copies.held == [0, 0, 0, 2, 0, 0, 0, 2]
    assert len(read_column("optimizer/update_ratio")) == 2
    assert read_column("optimizer/norm/momentum_buffer") == []
