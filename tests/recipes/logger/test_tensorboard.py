"""Event files read back with TensorBoard's own readers: the values of metrics.csv, each step once."""

import ast
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from faults import FaultAt
from support import ROOT, TINY, composed_config, read_metrics, resolved, run_train

from recipes.build import build
from recipes.config import compose_and_check
from recipes.entry.run import run_resolved
from recipes.errors import ConfigError
from recipes.logger.tensorboard import TensorBoardLogger

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator as PageReader,
)
from tensorboard.plugins.hparams import metadata
from tensorboard.summary.writer import event_file_writer
from tensorboard.util import tensor_util

Point = tuple[str, int, float]  # metric, step, value


@pytest.fixture(autouse=True)
def first_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count event files from 0: readers sort them by name, where file 10 of a second comes before its file 9."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


class EventFiles:
    """What TensorBoard's page and its reader for scripts find in a run folder, which must be the same.

    Attributes:
        rows: By step; a metric that is there twice is an error.
        texts: By tag, with their steps.
        hyperparameters: The values that the page compares runs by.
    """

    def __init__(self, run_folder: Path) -> None:
        files = PageReader(str(run_folder / "tensorboard"), size_guidance={"tensors": 0})
        files.Reload()
        self.texts: dict[str, list[tuple[int, str]]] = {}
        points: list[Point] = []
        tags = set(files.Tags()["tensors"])
        shown_as = {tag: files.SummaryMetadata(tag).plugin_data.plugin_name for tag in tags}
        for tag in sorted(tag for tag in tags if shown_as[tag] in ("scalars", "text")):
            for event in files.Tensors(tag):
                value = tensor_util.make_ndarray(event.tensor_proto).item()
                if shown_as[tag] == "scalars":
                    points.append((tag, event.step, value))
                else:
                    texts = self.texts.setdefault(tag.removesuffix("/text_summary"), [])
                    texts.append((event.step, value.decode()))
        self.rows: dict[int, dict[str, float]] = {}
        for tag, step, value in points:
            row = self.rows.setdefault(step, {})
            assert tag not in row, (tag, step)
            row[tag] = value
        # not comparable with a NaN among them, which equals nothing
        assert sorted(points) == sorted(_read_points(run_folder)) or "nan" in str(points)
        self._files = files

    @property
    def hyperparameters(self) -> dict[str, Any]:
        content = self._files.PluginTagToContent("hparams")["_hparams_/session_start_info"]
        values = metadata.parse_session_start_info_plugin_data(content).hparams
        return {name: getattr(values[name], values[name].WhichOneof("kind")) for name in values}

    @property
    def compared(self) -> list[str]:
        """The metrics that stand beside them."""
        content = self._files.PluginTagToContent("hparams")["_hparams_/experiment"]
        return [each.name.tag for each in metadata.parse_experiment_plugin_data(content).metric_infos]

    def assert_as_in_csv(self, run_folder: Path) -> None:
        """Check for the same steps and metrics; the last bit of float32 may differ: csv rounds to 9 digits before."""
        in_csv = {row.pop("step"): row for row in read_metrics(run_folder)}
        assert self.rows.keys() == in_csv.keys()
        for step, row in self.rows.items():
            assert row == pytest.approx(in_csv[step], rel=2**-23, abs=0, nan_ok=True), step

    def get_events(self) -> list[tuple[str, int]]:
        """Return the kinds of events and their steps, sorted."""
        kinds = [tag for tag in self.texts if tag.startswith("events/")]
        return sorted((tag.removeprefix("events/"), step) for tag in kinds for step, _ in self.texts[tag])


def _read_points(run_folder: Path) -> list[Point]:
    files = EventAccumulator(str(run_folder / "tensorboard"), size_guidance={"scalars": 0})
    files.Reload()
    tags = files.Tags()["scalars"]
    return [(tag, event.step, event.value) for tag in tags for event in files.Scalars(tag)]


def read_events(run_folder: Path) -> list[tuple[str, int]]:
    events = [json.loads(line) for line in (run_folder / "events.jsonl").open()]
    return sorted((event["event"], event["step"]) for event in events)


def get_overrides(folder: Path, text_folder: str, *more: str) -> list[str]:
    return [
        *TINY,
        f"data.path={text_folder}",
        f"hydra.run.dir={folder}",
        "logger=tensorboard",
        "save_every=4",
        "eval_every=4",
        *more,
    ]


def train(*overrides: str) -> int:
    composed, errors = compose_and_check(overrides)
    assert composed is not None
    assert not errors, [str(error) for error in errors]
    return run_resolved(composed)


def test_everything_logged_for_a_step_is_read_back_exactly(tmp_path: Path) -> None:
    logger = TensorBoardLogger(run_folder=tmp_path)
    loss = 0.10000000149011612  # a float32
    logger.log_metrics({"train/loss": loss, "train/tokens": 2.0**40, "epoch": 0}, step=0)
    logger.log_metrics({"val/loss": math.nan, "lr": math.inf}, step=0)
    logger.log_metrics({"train/loss": -0.5}, step=9)
    logger.finalize("success")
    rows = EventFiles(tmp_path).rows
    assert math.isnan(rows[1].pop("val/loss"))
    assert rows == {
        1: {"train/loss": loss, "train/tokens": 2.0**40, "lr": math.inf},
        10: {"train/loss": -0.5},
    }


def test_a_run_writes_the_values_of_metrics_csv_its_config_events_summary_and_samples(
    tmp_path: Path, text_folder: str
) -> None:
    folder = tmp_path / "run"
    sampling = [text for text in get_overrides(folder, text_folder) if "sample_text" not in text]
    assert train(*sampling, "trainer.max_steps=6", "callbacks.sample_text.num_tokens=8") == 0
    files = EventFiles(folder)
    files.assert_as_in_csv(folder)
    assert len(files.rows) == 6
    assert files.get_events() == read_events(folder)
    [(step, config)] = files.texts["config"]
    assert step == 0
    assert "    micro_batch_size: null" in config
    [(step, summary)] = files.texts["summary"]
    assert step == 6
    assert json.loads(summary) == json.loads((folder / "summary.json").read_text())
    samples = [json.loads(line) for line in (folder / "samples.jsonl").open()]
    assert len(files.texts["sample"]) == len(samples) > 0
    assert files.hyperparameters["model.hidden_size"] == 32


def test_hyperparameters_are_the_values_of_the_config_by_their_dotted_keys(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.yaml").write_text(
        "seed: 3\noptimizer: {lr: 0.1, betas: [0.9, 0.95]}\nresume: null\ncallbacks: {a: {b: 1}}\n"
        "checkpoint: {monitor: val/reward}\n"
    )
    logger = TensorBoardLogger(run_folder=tmp_path)
    logger.log_event("start", 0)
    logger.finalize("success")
    files = EventFiles(tmp_path)
    assert files.hyperparameters == {
        "seed": 3,
        "optimizer.lr": 0.1,
        "optimizer.betas": "[0.9, 0.95]",
        "checkpoint.monitor": "val/reward",
    }
    assert files.compared == ["train/loss", "val/reward"], "what ranks the checkpoints"


def test_a_run_that_crashed_and_was_resumed_has_each_step_once(tmp_path: Path, text_folder: str) -> None:
    folder = tmp_path / "run"
    overrides = get_overrides(folder, text_folder, "trainer.max_steps=12", "resume=auto")
    crash = "+callbacks.crash={_target_: support.CrashAt, step: 7}"
    assert train(*overrides, crash) == 1
    assert sorted(EventFiles(folder).rows) == [1, 2, 3, 4, 5, 6, 7]
    assert train(*overrides) == 0
    files = EventFiles(folder)
    files.assert_as_in_csv(folder)
    assert len(files.rows) == 12
    assert files.get_events() == read_events(folder)
    assert ("end", 7) in files.get_events()
    assert [step for step, _ in files.texts["config"]] == [0, 4]
    assert len(list((folder / "tensorboard").iterdir())) == 2


def test_a_validation_that_a_resume_repeats_is_there_once(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,train/loss,val/loss\n3,2,\n4,1.25,2.5\n")
    before = TensorBoardLogger(run_folder=tmp_path)
    for step in range(6):
        before.log_metrics({"train/loss": float(step)}, step=step)
    before.finalize("failed")
    after = TensorBoardLogger(run_folder=tmp_path)
    after.resume_at(4)
    after.log_metrics({"val/loss": 2.75}, step=3)
    after.log_metrics({"train/loss": 7.0}, step=4)
    after.finalize("success")
    rows = EventFiles(tmp_path).rows
    assert rows == {
        3: {"train/loss": 2.0},
        4: {"train/loss": 1.25, "val/loss": 2.75},
        5: {"train/loss": 7.0},
    }


@pytest.mark.parametrize("num_on_disk", [0, 2, 3])
def test_rows_that_a_kill_kept_from_the_disk_are_written_at_the_resume(num_on_disk: int, tmp_path: Path) -> None:
    rows = "".join(f"{step},{step}.5\n" for step in range(1, 5))
    (tmp_path / "metrics.csv").write_text(f"step,train/loss\n{rows}")
    saved = [{"time": 0, "step": step, "event": "checkpoint"} for step in (2, 4)]
    (tmp_path / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in saved))
    if num_on_disk:
        killed = TensorBoardLogger(run_folder=tmp_path)
        for step in range(num_on_disk):
            killed.log_metrics({"train/loss": step + 1.5}, step=step)
        killed.finalize("failed")
    after = TensorBoardLogger(run_folder=tmp_path)
    after.resume_at(4)
    after.log_metrics({"train/loss": 5.5}, step=4)
    after.finalize("success")
    files = EventFiles(tmp_path)
    assert files.rows == {step: {"train/loss": step + 0.5} for step in range(1, 6)}
    assert ("checkpoint", 4) in files.get_events()


def test_a_run_that_rolled_back_has_each_step_once_and_every_event(tmp_path: Path, text_folder: str) -> None:
    spikes = [
        "callbacks=[grad_norm,loss_scale,loss_spike]",
        *(f"callbacks.loss_spike.{text}" for text in ("window=32", "warmup_steps=16")),
        *(f"callbacks.loss_spike.{text}" for text in ("snapshot_every=10", "quarantine_steps=10")),
    ]
    overrides = [text for text in get_overrides(tmp_path, text_folder, *spikes) if not text.startswith("~")]
    rates = ["scheduler=constant", "optimizer.lr=1e-3", "seed=3", "save_every=10", "eval_every=20"]
    config = composed_config(*overrides, *rates, "trainer.max_steps=50")
    run = build(resolved(config, tmp_path))
    run.trainer.callbacks.insert(0, FaultAt(kind="weight", step=36))  # type: ignore[attr-defined]
    run.trainer.fit(run.task, datamodule=run.data)
    files = EventFiles(tmp_path)
    assert [step for step, _ in files.texts["events/rollback"]] == [30]
    files.assert_as_in_csv(tmp_path)
    assert len(files.rows) == 50
    assert files.get_events() == read_events(tmp_path)


def test_two_ranks_have_one_writer(tmp_path: Path, text_folder: str) -> None:
    folder = tmp_path / "run"
    ranks = ["strategy=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.max_steps=4"]
    process = run_train(get_overrides(folder, text_folder, *ranks))
    assert process.returncode == 0, process.stdout + process.stderr
    assert len(list((folder / "tensorboard").iterdir())) == 1
    EventFiles(folder).assert_as_in_csv(folder)


def test_a_full_disk_ends_the_files_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = TensorBoardLogger(run_folder=tmp_path)
    logger.log_metrics({"train/loss": 1.0}, step=0)
    logger.finalize("success")

    def full(*_: Any) -> None:
        raise OSError(28, os.strerror(28))

    assert logger.experiment is not None
    logger.experiment.file_writer.add_event = full  # type: ignore[method-assign]
    for step in (1, 2, 3):
        logger.log_metrics({"train/loss": 2.0}, step=step)
    logger.log_event("checkpoint", 3)
    assert len(caplog.messages) == 1
    assert "cannot be written to any more: No space left on device" in caplog.messages[0]
    assert sorted(EventFiles(tmp_path).rows) == [1]


def test_tensorboard_is_imported_only_if_chosen() -> None:
    for path in (ROOT / "recipes").glob("**/*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert "tensorboard" not in ast.unparse(node), path


def test_a_missing_package_is_an_error_that_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=r"logger=tensorboard: .*pip install -e '.\[tensorboard\]'"):
        TensorBoardLogger(run_folder=tmp_path)


def test_it_combines_with_any_logger_and_comes_after_metrics_csv() -> None:
    for chosen in ("tensorboard", "[csv,tensorboard]", "[none,tensorboard]"):
        assert list(composed_config(f"logger={chosen}")["logger"]) == ["csv", "tensorboard"]
