"""What RunReport shows of a fit in somebody else's project, where it is the only one that keeps anything."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from report_pages import get_data, get_points
from torch import Tensor

from callbacks import EarlyStop, LossSpikeRollback, ProgressLine, RunReport


def make_damaged(plain_module: Any, *, at: int) -> Any:
    """Return a module whose weights are damaged once, before a step; it has a hyperparameter."""

    class Damaged(plain_module):  # type: ignore[misc]
        def __init__(self, width: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.num_seen = 0

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.num_seen += 1
            if self.num_seen == at:
                with torch.no_grad():
                    self.layer.weight += 1e3
            return super().training_step(batch, batch_idx)

    return Damaged()


@pytest.mark.parametrize("with_logger", [False, True])
def test_spikes_and_rollbacks_are_shown_with_any_logger_or_none(
    plain_module: Any, make_trainer: Any, tmp_path: Path, with_logger: bool
) -> None:
    spikes = LossSpikeRollback(
        action="rollback", window=8, warmup_steps=8, snapshot_every=4, quarantine_steps=4, max_skips=0, min_rise=0.0
    )
    logger = CSVLogger(tmp_path, name="lightning_logs", version=0) if with_logger else False
    trainer = make_trainer(callbacks=[spikes, RunReport()], max_epochs=4, max_steps=30, logger=logger)
    trainer.fit(make_damaged(plain_module, at=22))
    folder = tmp_path / "lightning_logs/version_0" if with_logger else tmp_path
    page = (folder / "report.html").read_text()
    [from_step] = [mark[2] for mark in get_data(page)["marks"] if mark[1] == "rollback"]
    kinds = {mark[1] for mark in get_data(page)["marks"]}
    assert {"spike", "rollback"} <= kinds
    [to_step] = [mark[0] for mark in get_data(page)["marks"] if mark[1] == "rollback"]
    assert 0 < to_step < from_step <= 22
    assert "rollback &times; 1" in page
    assert 'class="dotted">rolled-back steps' in page
    # each step once, in order: the discarded ones are drawn apart
    steps = [step for step, _ in get_points(page, "train_loss")]
    assert steps == sorted(set(steps))
    [discarded] = [curve for chart in get_data(page)["charts"] for curve in chart["curves"] if curve["rolled_back"]][:1]
    assert discarded["rolled_back"]
    assert f"<h1>{'Damaged, version 0' if with_logger else tmp_path.name}</h1>" in page
    assert '<span class="status good">finished</span>' in page
    assert re.search(r"<th>rollbacks</th><td>1</td>", page)
    for text in (f"torch {torch.__version__}", "Damaged</td>", "width: 4", "<dt>time</dt>"):
        assert text in page, text


@pytest.mark.parametrize("which", ["EarlyStop", "EarlyStopping"])
def test_a_stop_is_shown(plain_module: Any, make_trainer: Any, tmp_path: Path, which: str) -> None:
    stop: Any = EarlyStop(monitor="val_loss", patience=1, min_delta=1e9)
    if which == "EarlyStopping":
        stop = EarlyStopping(monitor="val_loss", patience=1, min_delta=1e9)
    trainer = make_trainer(callbacks=[stop, RunReport()], max_epochs=9, limit_val_batches=1, logger=False)
    trainer.fit(plain_module())
    page = (tmp_path / "report.html").read_text()
    assert [mark[1] for mark in get_data(page)["marks"]] == ["stop"]
    assert '<span class="status warn">stopped</span>' in page


def test_learning_rates_of_lightnings_monitor_are_on_the_line(
    plain_module: Any, make_trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="lightning_recipes")
    make_trainer(callbacks=[LearningRateMonitor(), ProgressLine()], max_steps=2).fit(plain_module())
    assert [line for line in caplog.messages if "lr 1.0e-02" in line], caplog.messages
