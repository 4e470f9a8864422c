"""sweep.csv: best job first, by any number of a run, with the overrides that set each job apart; the ledger of jobs."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from recipes.errors import ConfigError
from recipes.launcher.job import Job, State, read_job, state_from_exit_code
from recipes.sweep.leaderboard import (
    check_objective,
    rank_jobs,
    read_objective,
    swept_overrides,
    write_leaderboard,
)
from recipes.sweep.sweep import Ledger


def save_job(folder: Path, number: int, overrides: list[str], state: State = State.FINISHED, **summary: Any) -> Job:
    """Write a job's folder, with a summary if there are values for it."""
    job = Job(number=number, folder=folder / str(number), overrides=overrides, state=state, exit_code=0)
    job.save()
    if summary:
        (job.folder / "summary.json").write_text(json.dumps(summary))
    return job


@pytest.fixture
def jobs(tmp_path: Path) -> list[Job]:
    overrides = [["model=gpt2", f"optimizer.lr={lr}"] for lr in ("1e-4", "3e-4", "1e-3", "3e-3")]
    return [
        save_job(tmp_path, 0, overrides[0], val_loss=3.5, tokens_per_second=100.0),
        save_job(tmp_path, 1, overrides[1], State.FAILED, val_loss=1.0),
        save_job(tmp_path, 2, overrides[2], val_loss=3.1, tokens_per_second=90.0),
        save_job(tmp_path, 3, [*overrides[3], "+tags=[a]"], State.RUNNING),
    ]


def test_the_best_job_is_first_and_jobs_without_a_result_are_last(jobs: list[Job]) -> None:
    assert [job.number for job in rank_jobs(jobs, "val_loss", "minimize")] == [2, 0, 1, 3]
    assert [job.number for job in rank_jobs(jobs, "tokens_per_second", "maximize")] == [0, 2, 1, 3]


def test_a_row_has_the_overrides_that_differ_between_jobs_and_no_others(tmp_path: Path, jobs: list[Job]) -> None:
    write_leaderboard(tmp_path, jobs, objective="val_loss", direction="minimize")
    with (tmp_path / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["optimizer.lr"] for row in rows] == ["1e-3", "1e-4", "3e-4", "3e-3"]
    assert [row["state"] for row in rows] == ["finished", "finished", "failed", "running"]
    assert [row["tags"] for row in rows] == ["", "", "", "[a]"]
    assert "model" not in rows[0]
    assert rows[0]["val_loss"] == "3.1"


def test_a_single_job_shows_the_overrides_of_the_known_sweep_keys(jobs: list[Job]) -> None:
    assert swept_overrides(jobs[:1]) == {0: {}}
    assert swept_overrides(jobs[:1], ["optimizer.lr"]) == {0: {"optimizer.lr": "1e-4"}}


def test_the_objective_may_be_the_last_value_of_a_metric(tmp_path: Path) -> None:
    job = save_job(tmp_path, 0, [], val_loss=3.0)
    (job.folder / "metrics.csv").write_text("step,grad/norm,val/loss\n1,2.5,\n2,1.5,3\n3,,\n")
    assert read_objective(job.folder, "grad/norm") == 1.5
    assert read_objective(job.folder, "memory/host_peak_gib") is None
    assert read_objective(tmp_path / "nowhere", "val_loss") is None


def test_an_unknown_objective_is_rejected_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"type sweep.objective=val_loss"):
        check_objective("valloss")
    with pytest.raises(ConfigError, match=r"type sweep.objective=val_loss"):
        check_objective("val_los")
    check_objective("val/perplexity")
    with pytest.raises(ConfigError, match=r"computes no loss; type sweep.objective=val/reward"):
        check_objective("best_val_loss", has_val_loss=False)
    check_objective("train_loss", has_val_loss=False)
    with pytest.raises(ConfigError, match=r"no run has this metric"):
        check_objective("acc")
    with pytest.raises(ConfigError, match=r"type sweep.objective=val_loss"):
        check_objective("val_los", logs_anything=True)
    check_objective("val_loss_epoch", logs_anything=True)
    check_objective("acc", "maximize", logs_anything=True)


def test_an_objective_with_the_wrong_direction_is_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    check_objective("best_val_loss", "minimize")
    check_objective("val/accuracy", "maximize")
    assert caplog.records == []
    check_objective("val/accuracy", "minimize")
    assert "a higher accuracy is better; type sweep.direction=maximize" in caplog.text


def test_a_job_of_an_earlier_command_is_found_by_its_overrides_in_any_order_but_only_once(
    tmp_path: Path,
) -> None:
    for number, overrides in enumerate([["a=1", "b=2"], ["a=2", "b=2"], ["b=2", "a=1"]]):
        save_job(tmp_path, number, overrides)
    ledger = Ledger(tmp_path)
    assert [getattr(ledger.claim(["a=1", "b=2"]), "number", None) for _ in range(3)] == [0, 2, None]
    assert ledger.free_number(1) == 3
    assert ledger.free_number(7) == 7


def test_a_job_is_read_back_from_a_folder_that_was_moved(tmp_path: Path) -> None:
    job = save_job(tmp_path, 4, ["a=1"], State.PREEMPTED)
    job.folder.rename(tmp_path / "moved")
    read = read_job(tmp_path / "moved" / "job.json")
    assert (read.number, read.overrides, read.state) == (4, ["a=1"], State.PREEMPTED)
    assert read.folder == tmp_path / "moved"


@pytest.mark.parametrize(
    ("exit_code", "state"),
    [
        (0, State.FINISHED),
        (1, State.FAILED),
        (2, State.REFUSED),
        (3, State.DIVERGED),
        (71, State.OUT_OF_MEMORY),
        (74, State.UNSAVED),
        (75, State.PREEMPTED),
        (130, State.INTERRUPTED),
        (143, State.INTERRUPTED),
        (-9, State.KILLED),
        (137, State.KILLED),
        (-15, State.KILLED),
    ],
)
def test_each_exit_code_maps_to_a_state_that_is_either_final_resumable_or_failed(exit_code: int, state: State) -> None:
    assert state_from_exit_code(exit_code) is state
    assert [state.is_over, state.is_cut, state.has_failed].count(True) == 1


OF_A_JOB = '{"composed": null, "cluster_job": null, "state": "finished", "number": %s, "overrides": %s}'
DAMAGED = ["", "{", "{}", "[]", "3", '{"composed": null}', '{"composed": 3, "state": "x"}']


@pytest.mark.parametrize("content", [*DAMAGED, OF_A_JOB % ('"1"', "[]"), OF_A_JOB % (1, "[3]"), OF_A_JOB % (1, '"a"')])
def test_a_damaged_job_is_named_with_what_to_do(tmp_path: Path, content: str) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0/job.json").write_text(content)
    with pytest.raises(ConfigError, match="rm .*job.json"):
        read_job(tmp_path / "0/job.json")


@pytest.mark.parametrize("name", ["../../secret", "7_x", "", 7, ["7"]])
def test_an_id_in_the_queue_that_no_cluster_gives_is_not_made_part_of_a_path(tmp_path: Path, name: object) -> None:
    job = Job(number=0, folder=tmp_path / "0", overrides=[], cluster_job="7_0")
    job.save()
    assert read_job(job.file).cluster_job == "7_0"
    job.file.write_text(json.dumps(json.loads(job.file.read_text()) | {"cluster_job": name}))
    with pytest.raises(ConfigError, match=r"is damaged: .*; type rm .*job\.json"):
        read_job(job.file)
