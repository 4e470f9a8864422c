"""LossSpikeRollback changes nothing in healthy training of any kind; 20,000 steps of each are in benchmarks/."""

import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from callbacks import LossSpikeRollback

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from healthy_runs import KINDS, record

STEPS = 120


class LossesSeen(LossSpikeRollback):
    """Keeps the losses that it judged."""

    def setup(self, *args: Any, **arguments: Any) -> None:
        super().setup(*args, **arguments)
        self.losses: list[float] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self.losses.append(float(loss.detach()))
        super().on_before_backward(trainer, pl_module, loss)


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_of_a_healthy_run_is_that_of_a_plain_loop(kind: str, make_trainer: Any) -> None:
    spikes = LossesSeen(action="rollback")
    module = KINDS[kind](STEPS, 1)
    trainer = make_trainer(callbacks=[spikes], max_steps=STEPS, logger=False)
    trainer.fit(module, DataLoader(range(STEPS)))  # type: ignore[arg-type]
    assert trainer.global_step == STEPS
    assert spikes.summary() == {"rollbacks": 0, "skipped_steps": 0}
    assert spikes.losses == [loss for loss, _, _ in record(kind, num_steps=STEPS, seed=1)]
