"""The debug dump of a spike: which micro-batches, losses and weights it holds, and what it survives."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor

from callbacks.loss_spike.detector import Alarm
from callbacks.loss_spike.dump import SpikeDump
from callbacks.loss_spike.monitor import SpikeMonitor, StepMeasurement, Verdict


class Model(torch.nn.Module):
    """Knows the loss of each sample, which here is the sample itself, and saves its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.modes: list[bool] = []

    def recipes_sample_losses(self, batch: Tensor) -> Tensor:
        self.modes.append(self.training)
        return batch

    def recipes_save_weights(self, folder: Path) -> None:
        folder.mkdir()
        torch.save(self.state_dict(), folder / "weights.pt")


def make_trainer(folder: Path, *, step: int, datamodule: Any = None) -> Any:
    import contextlib

    return SimpleNamespace(
        global_step=step,
        global_rank=0,
        is_global_zero=True,
        world_size=1,
        accumulate_grad_batches=2,
        loggers=[SimpleNamespace(log_dir=str(folder))],
        optimizers=[SimpleNamespace(param_groups=[{"lr": 0.5}])],
        precision_plugin=SimpleNamespace(forward_context=contextlib.nullcontext),
        strategy=SimpleNamespace(broadcast=lambda value: value),
        datamodule=datamodule,
        profiler=PassThroughProfiler(),
    )


def make_verdict(step: int, *, skipped: bool = True) -> Verdict:
    measurement = StepMeasurement(step=step, loss=9.0, norm=float("inf"), skipped=skipped)
    alarm = Alarm(kind="non_finite", value=float("inf"), expected=1.0, score=float("inf"))
    return Verdict(measurement=measurement, alarms={"norm": alarm}, score=float("inf"), skipped=skipped)


@pytest.fixture
def monitor() -> SpikeMonitor:
    return SpikeMonitor(window=4, warmup_steps=2, loss_threshold=8.0, norm_threshold=16.0, drift_threshold=None)


def record(dump: SpikeDump, folder: Path, step: int, batches: list[Tensor], **options: Any) -> None:
    for batch in batches:
        dump.record(make_trainer(folder, step=step - 1, **options), batch)


def read_samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_the_dump_holds_the_micro_batches_of_its_step_with_the_largest_losses_first(
    tmp_path: Path, monitor: SpikeMonitor
) -> None:
    dump, model = SpikeDump(max_folders=1), Model()
    record(dump, tmp_path, 6, [torch.tensor([7.0])])  # the step before is not part of it
    record(dump, tmp_path, 7, [torch.tensor([1.0, 3.0]), torch.tensor([2.0, float("nan")])])
    dump.write(make_trainer(tmp_path, step=7), model, make_verdict(7), monitor)
    folder = tmp_path / "spikes/step_0000007"
    samples = read_samples(folder)
    assert [(s["micro_batch"], s["row"], s["loss"]) for s in samples] == [
        (1, 1, None),  # NaN is the worst
        (0, 1, 3.0),
        (1, 0, 2.0),
        (0, 0, 1.0),
    ]
    saved = torch.load(folder / "rank_00000.pt", weights_only=True)
    assert torch.equal(saved["batches"][0], torch.tensor([1.0, 3.0]))
    assert [sorted(state) for state in saved["random"]] == [["cuda", "torch"]] * 2
    content = json.loads((folder / "spike.json").read_text())
    assert (content["step"], content["loss"], content["grad_norm"]) == (7, 9.0, None)
    assert content["alarms"]["norm"]["kind"] == "non_finite"
    assert content["learning_rates"] == [0.5]
    assert list(content["weight_norms"]) == ["layer"]
    assert (folder / "weights/weights.pt").is_file()


def test_losses_are_computed_in_eval_mode_which_is_restored(tmp_path: Path, monitor: SpikeMonitor) -> None:
    dump, model = SpikeDump(max_folders=1), Model()
    record(dump, tmp_path, 3, [torch.ones(2)])
    dump.write(make_trainer(tmp_path, step=3), model, make_verdict(3), monitor)
    assert model.modes == [False]
    assert model.training
    assert model.layer.training


@pytest.mark.parametrize(("skipped", "step_now"), [(False, 5), (True, 6)])
def test_weights_that_have_changed_since_the_step_are_not_saved(
    tmp_path: Path, monitor: SpikeMonitor, skipped: bool, step_now: int
) -> None:
    dump = SpikeDump(max_folders=1)
    record(dump, tmp_path, 5, [torch.ones(2)])
    trainer = make_trainer(tmp_path, step=step_now)
    dump.write(trainer, Model(), make_verdict(5, skipped=skipped), monitor)
    assert (tmp_path / "spikes/step_0000005/spike.json").is_file()
    assert not (tmp_path / "spikes/step_0000005/weights").exists()


def test_later_spikes_write_no_folder_once_there_are_enough(tmp_path: Path, monitor: SpikeMonitor) -> None:
    dump = SpikeDump(max_folders=2)
    for step in (1, 2, 3):
        record(dump, tmp_path, step, [torch.ones(2)])
        dump.write(make_trainer(tmp_path, step=step), Model(), make_verdict(step), monitor)
    names = sorted(path.name for path in (tmp_path / "spikes").iterdir())
    assert names == ["step_0000001", "step_0000002"]
    assert dump.num_folders == 2


def test_micro_batches_of_steps_that_were_rolled_back_are_forgotten(tmp_path: Path, monitor: SpikeMonitor) -> None:
    dump = SpikeDump(max_folders=1)
    record(dump, tmp_path, 4, [torch.tensor([5.0])])
    dump.clear()
    record(dump, tmp_path, 4, [torch.tensor([6.0])])
    dump.write(make_trainer(tmp_path, step=4), Model(), make_verdict(4), monitor)
    assert [s["loss"] for s in read_samples(tmp_path / "spikes/step_0000004")] == [6.0]


def test_a_datamodule_describes_its_samples(tmp_path: Path, monitor: SpikeMonitor) -> None:
    def describe(position: int) -> list[dict[str, Any]]:
        return [{"rank": 0, "micro_batch": 0, "row": row, "document": position + row} for row in (0, 1)]

    data = SimpleNamespace(position=40, samples_of_step=describe)
    dump = SpikeDump(max_folders=1)
    record(dump, tmp_path, 2, [torch.tensor([1.0, 2.0])], datamodule=data)
    trainer = make_trainer(tmp_path, step=2, datamodule=data)
    dump.write(trainer, Model(), make_verdict(2), monitor)
    samples = read_samples(tmp_path / "spikes/step_0000002")
    assert [(s["document"], s["loss"]) for s in samples] == [(41, 2.0), (40, 1.0)]


def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monitor: SpikeMonitor, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "spikes").write_text("a file in the way")
    dump = SpikeDump(max_folders=1)
    record(dump, tmp_path, 2, [torch.ones(2)])
    dump.write(make_trainer(tmp_path, step=2), Model(), make_verdict(2), monitor)
    assert "could not be written" in caplog.text
