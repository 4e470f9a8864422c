"""Roll back once and repeat the steps, case by case, as one rank: python rollback_ranks.py <cases.json> <results.json>.

A case is a list of overrides and a data node that replaces the composed one. The run rolls back once, after `at`
steps, data included; the result is the loss of every executed step, with its step number, and on how many ranks each
tensor of the train state was another than at the start of training, at the step that is restored, or after it.
"""

import hashlib
import itertools
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path[:0] = [str(folder) for folder in Path(__file__).parents[:3]]

import recipes  # noqa: E402, F401  # isort: skip  # before Lightning, as in conftest.py

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import yaml  # noqa: E402
from lightning.pytorch.callbacks import Callback  # noqa: E402
from run_cases import run_all  # noqa: E402
from support import ROOT, composed_config, read_metrics, resolved  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

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


class States(Callback):
    """Records the bits of weights, buffers and optimizer state on this rank, by the moment and the tensor's name."""

    def __init__(self, to: int) -> None:
        self.at: dict[str, dict[str, str]] = {}
        self._to = to

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.at["start"] = read_state(trainer)
        self.trained = sorted(name for name, weight in pl_module.named_parameters() if weight.requires_grad)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self._to:
            self.at.setdefault("to", read_state(trainer))
        self.at["last"] = read_state(trainer)  # before a rollback at the end of this batch, at last of the run

    def on_rollback(self, trainer: Any, *_: Any) -> None:
        self.at["at"] = self.at["last"]
        self.at["restored"] = read_state(trainer)

    def count_differences(self, one: str, other: str) -> dict[str, int]:
        """Return on how many ranks each tensor differs between two moments, or is there at one of them alone."""
        first, second = self.at[one], self.at[other]
        own = [name for name in {*first, *second} if first.get(name) != second.get(name)]
        of_all: list[Any] = [own]
        if dist.is_initialized():
            of_all = [None] * dist.get_world_size()
            dist.all_gather_object(of_all, own)
        return dict(sorted(Counter(itertools.chain(*of_all)).items()))


def read_state(trainer: Any) -> dict[str, str]:
    """Return a hash of each tensor and number in the weights, buffers and optimizers of this rank."""
    found: dict[str, str] = {}
    for name, tensor in trainer.lightning_module.state_dict().items():
        _add(found, f"module/{name}", tensor)
    for number, optimizer in enumerate(trainer.optimizers):
        _add(found, f"optimizer/{number}", optimizer.state_dict())
    return found


def _add(found: dict[str, str], name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _add(found, f"{name}/{key}", inner)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _add(found, f"{name}/{index}", inner)
    elif isinstance(value, torch.Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        words = local.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        found[name] = f"{local.dtype} {tuple(local.shape)} {hashlib.sha256(words).hexdigest()}"
    elif hasattr(value, "loss_scale"):  # DeepSpeed's
        numbers = {key: inner for key, inner in vars(value).items() if isinstance(inner, int | float)}
        _add(found, name, numbers)
    else:
        found[name] = repr(value)


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
    losses, states = Losses(spikes), States(case["to"])
    before = [losses, *([states] if case["reads_state"] else [])]
    run.trainer.callbacks[1:1] = [*before, spikes]  # type: ignore[attr-defined]
    run.trainer.fit(run.task, datamodule=run.data)
    run.trainer.strategy.barrier()
    moments = [("to", "restored"), ("to", "at"), ("start", "last")] if case["reads_state"] else []
    return {
        "differences": {f"{one}, {other}": states.count_differences(one, other) for one, other in moments},
        "trained": states.trained if case["reads_state"] else [],
        "losses": losses.by_step,
        "to": case["to"],
        "rows": read_metrics(folder) if run.trainer.is_global_zero else [],
        "num_bytes": spikes._recovery.rollback.num_bytes,
        "files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*")),
    }


if __name__ == "__main__":
    run_all(run_case)
