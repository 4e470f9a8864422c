"""The page of a pipeline: a row per stage in its order, and steps that go on from stage to stage."""

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml
from report_pages import get_data

from callbacks.report.compare.stages import write_stages

ROOT = Path(__file__).parents[4]
DASHBOARD = yaml.safe_load((ROOT / "conf/dashboard/default.yaml").read_text())["sections"]


def _write_stage(folder: Path, losses: list[float], **summary: Any) -> dict[str, Any]:
    """Write the folder of a stage; return its entry in pipeline.json."""
    folder.mkdir(parents=True)
    if losses:
        rows = "".join(f"{10 * (i + 1)},{loss},{loss + 1},0.{i}\n" for i, loss in enumerate(losses))
        (folder / "metrics.csv").write_text(f"step,train/loss,val/loss,val/exact_match\n{rows}")
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    return {"folder": folder.name, "state": "finished", "seconds": 61.0, "overrides": [f"recipe={folder.name[2:]}"]}


def test_the_curves_of_a_stage_follow_those_of_the_stages_before(tmp_path: Path) -> None:
    stages = {
        "first": _write_stage(tmp_path / "1_first", [3.0, 2.0]),
        "looks": _write_stage(tmp_path / "2_looks", [], evaluations={"val": {"loss": 2.5, "exact_match": 0.25}}),
        "second": _write_stage(tmp_path / "3_second", [1.5, 1.0, 0.5]),
    }
    stages["looks"]["overrides"] = ["mode=evaluate"]
    (tmp_path / "3_second/report.html").write_text("its own page")
    write_stages("mine", stages, tmp_path / "report.html", dashboard=DASHBOARD)
    page = (tmp_path / "report.html").read_text()
    losses = next(chart for chart in get_data(page)["charts"] if chart["title"] == "train/loss")
    steps = {curve["name"]: [*accumulate(curve["steps"])] for curve in losses["curves"]}
    assert steps == {"first": [10, 20], "second": [30, 40, 50]}
    assert page.index('data-v="first"') < page.index('data-v="looks"') < page.index('data-v="second"')
    assert '<a href="3_second/report.html">second</a>' in page
    assert "mode=evaluate" in page
    assert "1:01" in page, "the time of a stage without one in its summary"
    assert 'data-v="2.5"' in page, "the loss of an evaluation stands in the column of validation"
    assert 'data-v="0.25"' in page


def test_a_policy_has_no_loss_beside_those_of_the_stages_before(tmp_path: Path) -> None:
    measures = {"reward/mean": True, "train/loss": None}
    stages = {"sft": _write_stage(tmp_path / "1_sft", [3.0, 2.0])}
    stages["grpo"] = _write_stage(tmp_path / "2_grpo", [], train_loss=0.0123, measures=measures)
    (tmp_path / "2_grpo/metrics.csv").write_text("step,train/loss,reward/mean\n10,1e-9,0.5\n20,0.0123,0.75\n")
    write_stages("mine", stages, tmp_path / "report.html", dashboard=DASHBOARD)
    page = (tmp_path / "report.html").read_text()
    drawn = {chart["title"]: [curve["name"] for curve in chart["curves"]] for chart in get_data(page)["charts"]}
    assert drawn["reward of completions"] == ["grpo"]
    assert [names for title, names in drawn.items() if "loss" in title] == [["sft"], ["sft"]], "train and val"
    assert "0.0123" not in page.partition("<script")[0]
