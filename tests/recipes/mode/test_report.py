"""mode=report: runs are found by folder, glob and sweep; what names none is a mistake in three clauses."""

import logging
from pathlib import Path
from typing import Any

import pytest

from recipes.config.compose import Composed
from recipes.errors import ConfigError
from recipes.mode.report import find_runs, report

COMPOSED = Composed(config={}, choices={}, run_folder=Path("unused"), overrides=[])


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A sweep of three jobs, of which the last failed at its start; a run beside it; an empty folder."""
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
    return [str(folder.relative_to(logs)) for folder in folders]


def test_a_sweeps_folder_means_its_jobs_the_failed_one_too(logs: Path) -> None:
    assert names(find_runs([str(logs / "sweep")]), logs) == ["sweep/0", "sweep/1", "sweep/2"]


def test_the_folder_of_all_logs_means_every_run_below(logs: Path) -> None:
    assert names(find_runs([str(logs)]), logs) == ["alone", "sweep/0", "sweep/1", "sweep/2"]


def test_a_glob_and_a_folder_name_each_run_once(logs: Path) -> None:
    words = [str(logs / "sweep" / "[01]"), str(logs / "sweep" / "0"), str(logs / "alone")]
    assert names(find_runs(words), logs) == ["sweep/0", "sweep/1", "alone"]


@pytest.mark.parametrize(
    ("word", "why"), [("nowhere", "there is no such folder"), ("empty", "there is no run in it")]
)
def test_a_word_that_names_no_run_is_a_mistake(logs: Path, word: str, why: str) -> None:
    with pytest.raises(ConfigError) as raised:
        find_runs([str(logs / "alone"), str(logs / word)])
    assert raised.value.setting == f"mode.runs=[{logs / word}]"
    assert raised.value.reason == why
    assert raised.value.fix.startswith("mode.runs=[")


def test_no_word_is_a_mistake() -> None:
    with pytest.raises(
        ConfigError, match=r"mode.runs=\[\]: no run is named; type mode.runs=\[logs/"
    ):
        find_runs([])


def carry_out(logs: Path, written: list[Any], **more: Any) -> int:
    def write(folders: list[Path], path: Path, *, sort: str, dashboard: list[Any]) -> None:
        if sort == "unknown":
            raise LookupError("no run has it; they have val_loss")
        written.append((names(folders, logs), path, sort, dashboard))

    words: dict[str, Any] = {"runs": str(logs / "sweep"), "sort": "val_loss", "path": None}
    return report(COMPOSED, **{**words, **more}, dashboard=[{"title": "a"}], write=write)


def test_the_page_lies_where_all_the_runs_do_and_its_path_is_the_last_line(
    logs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="lightning_recipes")
    written: list[Any] = []
    assert carry_out(logs, written) == 0
    page = logs / "sweep" / "report.html"
    jobs = ["sweep/0", "sweep/1", "sweep/2"]
    assert written == [(jobs, page, "val_loss", [{"title": "a"}])]
    assert caplog.messages[-1] == str(page)


def test_a_single_runs_own_page_is_left_alone(logs: Path) -> None:
    written: list[Any] = []
    carry_out(logs, written, runs=[str(logs / "alone")])
    assert written[0][1] == logs / "report.html"


def test_the_page_can_be_put_elsewhere_by_file_or_folder(logs: Path) -> None:
    written: list[Any] = []
    carry_out(logs, written, path=str(logs / "x.html"))
    carry_out(logs, written, path=str(logs / "empty"))
    assert [path for _, path, _, _ in written] == [logs / "x.html", logs / "empty" / "report.html"]


def test_a_page_in_a_run_folder_would_replace_that_runs_own(logs: Path) -> None:
    (logs / "sweep" / "config.yaml").write_text("")
    jobs = [str(logs / "sweep" / number) for number in "01"]
    with pytest.raises(
        ConfigError, match=r"mode.path=null: .*/sweep is a run with a page of its own"
    ):
        carry_out(logs, [], runs=jobs)


def test_a_sort_that_no_run_has_is_a_mistake(logs: Path) -> None:
    with pytest.raises(
        ConfigError, match="mode.sort=unknown: no run has it; they have val_loss; type"
    ):
        carry_out(logs, [], sort="unknown")
