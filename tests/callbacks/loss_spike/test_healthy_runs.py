"""LossSpikeRollback changes nothing in healthy training of any kind; 20,000 steps of each are in benchmarks/."""

import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from callbacks import LossSpikeRollback

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from healthy_runs import GROWING, KINDS, record

STEPS = 120


class LossesSeen(LossSpikeRollback):
    """Keeps the losses that it judged."""

    def setup(self, *args: Any, **arguments: Any) -> None:
        super().setup(*args, **arguments)
        self.losses: list[float] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self.losses.append(float(loss.detach()))
        super().on_before_backward(trainer, pl_module, loss)


def losses_under(spikes: LossesSeen, make_trainer: Any, kind: str, *, num_steps: int) -> list[float]:
    trainer = make_trainer(callbacks=[spikes], max_steps=num_steps, logger=False)
    trainer.fit(KINDS[kind](num_steps, 1), DataLoader(range(num_steps)))  # type: ignore[arg-type]
    assert trainer.global_step == num_steps
    return spikes.losses


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in GROWING])
def test_every_step_of_a_healthy_run_is_that_of_a_plain_loop_even_with_rollbacks(kind: str, make_trainer: Any) -> None:
    spikes = LossesSeen(action="rollback")
    losses = losses_under(spikes, make_trainer, kind, num_steps=STEPS)
    assert spikes.summary() == {"rollbacks": 0, "skipped_steps": 0}
    assert losses == [loss for loss, _, _ in record(kind, num_steps=STEPS, seed=1)]


@pytest.mark.parametrize("kind", GROWING)
def test_where_the_loss_grows_beyond_all_before_only_the_default_costs_no_step(kind: str, make_trainer: Any) -> None:
    steps = 4 * STEPS
    default, skipping = LossesSeen(), LossesSeen(action="skip")
    losses = losses_under(default, make_trainer, kind, num_steps=steps)
    assert losses == [loss for loss, _, _ in record(kind, num_steps=steps, seed=1)]
    losses_under(skipping, make_trainer, kind, num_steps=steps)
    assert default.summary()["skipped_steps"] == 0 < skipping.summary()["skipped_steps"]
