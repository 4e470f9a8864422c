"""Roll back once and repeat the steps, case by case, as one rank: python rollback_ranks.py <cases.json> <results.json>.

A case is a list of overrides and a data node that replaces the composed one. The run rolls back once, after `at`
steps, data included; the result is the loss of every executed step, with its step number.
"""

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(folder) for folder in Path(__file__).parents[:3]]

import yaml  # noqa: E402
from lightning.pytorch.callbacks import Callback  # noqa: E402
from run_cases import run_all  # noqa: E402
from support import ROOT, composed_config, read_metrics, resolved  # noqa: E402

from callbacks.loss_spike import callback as loss_spike  # noqa: E402
from callbacks.loss_spike.callback import LossSpikeRollback  # noqa: E402
from callbacks.loss_spike.detector import Alarm  # noqa: E402
from callbacks.loss_spike.monitor import StepMeasurement, Verdict  # noqa: E402
from callbacks.loss_spike.reader import StepReader  # noqa: E402
from recipes.build import build  # noqa: E402


class DriftsOnce(StepReader):
    """Reports drift once, at a step with a normal loss."""

    at: int
    spikes: LossSpikeRollback

    def read(self, trainer: Any) -> Verdict | None:
        verdict = super().read(trainer)
        assert verdict is not None
        assert not verdict.skipped, verdict
        if self.spikes._recovery.escalation.counts.clock + 1 != self.at:
            return verdict
        loss = verdict.measurement.loss
        measurement = StepMeasurement(step=self.at, loss=loss, norm=None, skipped=False)
        alarm = Alarm(kind="drift", value=loss, expected=0.0, score=9.0)
        return Verdict(measurement=measurement, alarms={"loss": alarm}, score=9.0, skipped=False)


class Losses(Callback):
    """Records the loss of every executed step over all ranks, as the step guard sees it."""

    def __init__(self, spikes: LossSpikeRollback) -> None:
        self.by_step: list[tuple[int, float]] = []
        self._spikes = spikes

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.by_step.append((trainer.global_step + 1, float(self._spikes._reader.loss)))


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train; return the loss of every step, the metric rows, the snapshot size and the files left behind."""
    config = composed_config(*case["overrides"]) | {"data": case["data"]}
    run = build(resolved(config, folder))
    arguments = yaml.safe_load((ROOT / "conf/callbacks/loss_spike.yaml").read_text())["loss_spike"]
    arguments |= {"snapshot_every": case["to"], "quarantine_steps": case["to"]}
    arguments |= case["arguments"]
    arguments.pop("_target_")
    spikes = LossSpikeRollback(**arguments, rewind_data=True)
    DriftsOnce.at, DriftsOnce.spikes = case["at"], spikes
    loss_spike.StepReader = DriftsOnce  # type: ignore[misc]
    losses = Losses(spikes)
    run.trainer.callbacks[1:1] = [losses, spikes]  # type: ignore[attr-defined]
    run.trainer.fit(run.task, datamodule=run.data)
    run.trainer.strategy.barrier()
    return {
        "losses": losses.by_step,
        "to": case["to"],
        "rows": read_metrics(folder) if run.trainer.is_global_zero else [],
        "num_bytes": spikes._recovery.rollback.num_bytes,
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*")),
    }


if __name__ == "__main__":
    run_all(run_case)
