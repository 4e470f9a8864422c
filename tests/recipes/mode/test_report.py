"""mode=report: runs are found by folder, glob and sweep; a pattern that names none is a config error."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from recipes.config.resolved import ResolvedRun
from recipes.errors import ConfigError
from recipes.mode.report import find_runs, report

COMPOSED = ResolvedRun(config={}, choices={}, run_folder=Path("unused"), overrides=[])


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Write a sweep of three jobs, the last of which failed at its start; another run; an empty folder."""
    for name, file in (
        ("sweep/0", "metrics.csv"),
        ("sweep/1", "config.yaml"),
        ("sweep/2", "train.log"),
        ("alone", "summary.json"),
    ):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / file).write_text("")
    (tmp_path / "sweep" / "multirun.yaml").write_text("")
    (tmp_path / "empty").mkdir()
    return tmp_path


def names(folders: list[Path], logs: Path) -> list[str]:
    """Return the folders relative to `logs`."""
    return [str(folder.relative_to(logs)) for folder in folders]


def test_the_folder_of_a_sweep_means_all_its_jobs_failed_ones_included(logs: Path) -> None:
    assert names(find_runs([str(logs / "sweep")]), logs) == ["sweep/0", "sweep/1", "sweep/2"]


def test_the_logs_folder_means_every_run_below_it(logs: Path) -> None:
    assert names(find_runs([str(logs)]), logs) == ["alone", "sweep/0", "sweep/1", "sweep/2"]


def test_a_glob_and_a_folder_name_each_run_once(logs: Path) -> None:
    patterns = [str(logs / "sweep" / "[01]"), str(logs / "sweep" / "0"), str(logs / "alone")]
    assert names(find_runs(patterns), logs) == ["sweep/0", "sweep/1", "alone"]


@pytest.mark.parametrize(
    ("name", "reason"), [("nowhere", "there is no such folder"), ("empty", "there is no run in it")]
)
def test_a_pattern_that_names_no_run_is_an_error(logs: Path, name: str, reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        find_runs([str(logs / "alone"), str(logs / name)])
    assert raised.value.setting == f"mode.runs=[{logs / name}]"
    assert raised.value.reason == reason
    assert raised.value.fix.startswith("mode.runs=[")


def test_the_events_of_tensorboard_are_no_table_and_are_answered_with_one(tmp_path: Path) -> None:
    (tmp_path / "version_0").mkdir()
    (tmp_path / "version_0/events.out.tfevents.1.host.2.0").touch()
    for folder in (tmp_path, tmp_path / "version_0"):
        with pytest.raises(ConfigError, match="events of TensorBoard, and no metrics.csv; type mode=diagnose"):
            find_runs([str(folder)])


def test_an_empty_list_of_runs_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"mode.runs=\[\]: no run is named; type mode.runs=\[logs/"):
        find_runs([])


def run_report(logs: Path, written: list[Any], **arguments: Any) -> int:
    """Run the mode on the sweep, and append the arguments of `write` to `written`."""

    def write(folders: list[Path], path: Path, *, sort: str, dashboard: list[Any]) -> None:
        if sort == "unknown":
            raise LookupError("no run has it; they have val_loss")
        written.append((names(folders, logs), path, sort, dashboard))

    defaults: dict[str, Any] = {"runs": str(logs / "sweep"), "sort": "val_loss", "path": None}

    def write_stages(title: str, stages: dict[str, Any], path: Path, *, dashboard: list[Any]) -> None:
        written.append(([title, *stages], path, "", dashboard))

    given = {**defaults, **arguments}
    return report(COMPOSED, **given, dashboard=[{"title": "a"}], write=write, write_stages=write_stages)


def test_the_page_is_written_next_to_the_runs_and_its_path_is_the_last_line(
    logs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="lightning_recipes")
    written: list[Any] = []
    assert run_report(logs, written) == 0
    page = logs / "sweep" / "report.html"
    jobs = ["sweep/0", "sweep/1", "sweep/2"]
    assert written == [(jobs, page, "val_loss", [{"title": "a"}])]
    assert caplog.messages[-1] == str(page)


def test_the_own_page_of_a_single_run_is_not_overwritten(logs: Path) -> None:
    written: list[Any] = []
    run_report(logs, written, runs=[str(logs / "alone")])
    assert written[0][1] == logs / "report.html"


def test_the_folder_of_a_pipeline_has_the_page_of_its_stages(logs: Path) -> None:
    stages = {name: {"folder": folder} for name, folder in (("sft", "1"), ("pretrain", "0"))}
    (logs / "sweep/pipeline.json").write_text(json.dumps({"pipeline": "mine", "stages": stages}))
    written: list[Any] = []
    run_report(logs, written)
    run_report(logs, written, path=str(logs / "empty"))
    assert [(names, path) for names, path, _, _ in written] == [
        (["mine", "sft", "pretrain"], logs / "sweep/report.html"),
        (["mine", "sft", "pretrain"], logs / "empty/report.html"),
    ]


def test_the_page_can_be_written_to_another_file_or_folder(logs: Path) -> None:
    written: list[Any] = []
    run_report(logs, written, path=str(logs / "x.html"))
    run_report(logs, written, path=str(logs / "empty"))
    assert [path for _, path, _, _ in written] == [logs / "x.html", logs / "empty" / "report.html"]


def test_a_page_that_would_replace_the_own_page_of_a_run_is_an_error(logs: Path) -> None:
    (logs / "sweep" / "config.yaml").write_text("")
    jobs = [str(logs / "sweep" / number) for number in "01"]
    with pytest.raises(ConfigError, match=r"mode.path=null: .*/sweep is a run with a page of its own"):
        run_report(logs, [], runs=jobs)
    (logs / "sweep/0/report.html").write_text("<title>Run</title>")
    for path in ("sweep/0", "sweep/0/report.html"):
        reason = rf"mode.path={logs}/{path}: {logs}/sweep/0 is a run, .*; type mode.path={logs}/sweep/0/report_2.html"
        with pytest.raises(ConfigError, match=reason):
            run_report(logs, [], runs=jobs, path=str(logs / path))


def test_sorting_by_what_no_run_has_is_an_error(logs: Path) -> None:
    with pytest.raises(ConfigError, match="mode.sort=unknown: no run has it; they have val_loss; type"):
        run_report(logs, [], sort="unknown")


def test_policies_are_ranked_by_their_held_out_reward_as_they_have_no_validation_loss(logs: Path) -> None:
    written: list[Any] = []
    for columns, expected in (("train/loss,val/reward", "val/reward"), ("val/loss,val/reward", "val_loss")):
        (logs / "sweep/0/metrics.csv").write_text(f"step,{columns}\n")
        run_report(logs, written, sort=None)
        assert written[-1][2] == expected
