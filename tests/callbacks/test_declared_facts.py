"""A first-class callback is one module and one YAML file: summary field, event, mark and range are declared there."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import TINY, composed_config, resolved

from callbacks.report.charts.series import Mark, get_marks
from callbacks.report.run_record import read_run
from recipes.build import build
from recipes.config.check.ranges import check_ranges
from recipes.logger.summary import collect_summary_fields

MODULE = """
from typing import Annotated, Any, ClassVar

from lightning.pytorch import Callback

from callbacks.events import log_event


class WarmRoom(Callback):
    summary_fields: ClassVar[dict[str, Any]] = {"hottest": None, "skipped_steps": 0}
    summed_fields: ClassVar[frozenset[str]] = frozenset({"skipped_steps"})
    events: ClassVar[dict[str, Any]] = {"too_warm": {}, "aired": {"mark": "span"}, "noted": {"mark": "none"}}

    def __init__(self, *, limit: Annotated[int, ">= 1"]) -> None:
        self.limit = limit
        self.hottest = None

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.hottest = 10 * trainer.global_step
        if trainer.global_step == 2:
            log_event(trainer, "too warm", "too_warm", 2, degrees=20)
            log_event(trainer, None, "aired", 1, **{"from": 2})
            log_event(trainer, None, "noted", 2)

    def summary(self) -> dict[str, Any]:
        return {"hottest": self.hottest, "skipped_steps": 3}
"""
NODE = """
warm_room:
  _target_: warm_room.WarmRoom
  limit: 5
"""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Write the module of a new callback; return its config node."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code/warm_room.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    yield yaml.safe_load(NODE)
    sys.modules.pop("warm_room", None)


def test_its_summary_field_event_and_marks_reach_the_run_folder_and_the_report(
    node: dict[str, Any], tmp_path: Path, text_folder: str
) -> None:
    overrides = ["trainer.max_steps=3", "log_every=1", "callbacks=[loss_spike]"]
    tiny = [override for override in TINY if not override.startswith("~")]
    config = composed_config(*tiny, f"data.path={text_folder}", *overrides)
    config["callbacks"] |= node
    folder = tmp_path / "run"
    folder.mkdir()
    run = build(resolved(config, folder))
    run.trainer.fit(run.task, datamodule=run.data)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["hottest"] == 30
    assert summary["skipped_steps"] == 3  # none by loss_spike
    assert summary["rollbacks"] == 0
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [event["degrees"] for event in events if event["event"] == "too_warm"] == [20]
    marks = get_marks(read_run(folder).events)
    assert marks == [Mark(1, "aired", from_step=2), Mark(2, "too_warm")]


def test_a_value_outside_its_range_is_a_config_error(node: dict[str, Any]) -> None:
    assert list(check_ranges({"callbacks": node})) == []
    node["warm_room"]["limit"] = 0
    [error] = check_ranges({"callbacks": node})
    assert "callbacks.warm_room.limit=0" in str(error)
    assert "callbacks.warm_room.limit=<at least 1>" in str(error)


def test_an_event_that_nobody_declares_is_marked_by_a_line() -> None:
    events = [{"step": 4, "event": "anything"}, {"step": 4, "event": "checkpoint"}]
    assert get_marks(events) == [Mark(4, "anything")]


def test_a_field_keeps_its_declared_value_until_it_is_known_and_summed_fields_add_up() -> None:
    class Counter:
        summary_fields = {"skipped_steps": 0, "first": None}
        summed_fields = frozenset({"skipped_steps"})

        def summary(self) -> dict[str, Any]:
            return {"skipped_steps": 2, "undeclared": 1}

    callbacks: Any = [Counter(), Counter(), object()]
    assert collect_summary_fields(callbacks) == {"skipped_steps": 4, "first": None}
