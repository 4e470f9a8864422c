"""Runs and sweeps on a real SLURM: arrays, preemption and requeue, Ctrl-C, a killed sweep process."""

import json
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import Cluster
from support import run_train, write_texts
from sweeping import Sweeps, by_job, rows, wait_until

from recipes.logger.wandb.session import STEP
from tests.recipes.logger.test_wandb import find_rows, one_of, records_of

DDP = ("launcher=slurm", "launcher.partition=low", "strategy=ddp", "trainer.devices=2")
TWO = "optimizer.lr=1e-3,3e-3"


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory, slurm: Cluster) -> Iterator[Sweeps]:
    folder = tmp_path_factory.mktemp("on_slurm")
    sweeps = Sweeps(folder, str(write_texts(folder / "texts")), environ=slurm.environment)
    yield sweeps
    for process in sweeps.started:
        process.kill()


@pytest.fixture(scope="module")
def undisturbed(sweeps: Sweeps) -> Path:
    """Run the same two jobs on this machine, without SLURM."""
    exit_code, output = sweeps.run("local", TWO, "strategy=ddp", "trainer.devices=2", records="records_local")
    assert exit_code == 0, output
    return sweeps.folder / "local"


@pytest.mark.timeout(600)
def test_a_sweep_is_one_array_of_two_task_jobs_with_the_curves_of_runs_without_slurm(
    sweeps: Sweeps, undisturbed: Path
) -> None:
    exit_code, output = sweeps.run("array", TWO, *DDP, records="records_array")
    assert exit_code == 0, output
    board = sweeps.board("array")
    assert [row["state"] for row in board] == ["finished", "finished"]
    arrays = {row["cluster_job"].split("_")[0] for row in board}
    assert len(arrays) == 1
    assert sorted(row["cluster_job"].split("_")[1] for row in board) == ["0", "1"]
    for folder, ranks in by_job(sweeps.records("records_array")).items():
        assert sorted(rank["rank"] for rank in ranks) == [0, 1], folder
        assert sorted(rank["SLURM_PROCID"] for rank in ranks) == ["0", "1"]
    for job in ("0", "1"):
        assert rows(sweeps.folder / "array" / job) == rows(undisturbed / job)


@pytest.mark.timeout(600)
def test_a_preempted_run_is_requeued_and_resumes_in_its_folder_under_its_wandb_id_to_the_same_curve(
    sweeps: Sweeps, slurm: Cluster
) -> None:
    run_of_8 = ("optimizer.lr=3e-3", "trainer.max_steps=8", "logger=wandb")
    alone = sweeps.start_run("alone", "strategy=ddp", "trainer.devices=2", *run_of_8)
    output = alone.end()
    assert alone.process.returncode == 0, output
    # steps long enough for the ranks to agree on the last one
    run = sweeps.start_run("preempted", *DDP, *run_of_8, wait_at_lr=3e-3, seconds_a_step=0.5)
    output = run.end()
    assert run.process.returncode == 0, output
    folder = sweeps.folder / "preempted"
    name = json.loads((folder / "job.json").read_text())["cluster_job"]
    assert f"Submitted as job {name}" in output
    wait_until((folder / "waits").exists, 120)
    urgent = slurm.submit("--partition=high", "--ntasks=4", "--wrap=true", folder=sweeps.folder)
    slurm.wait(urgent, "COMPLETED")
    again = slurm.wait(name, "COMPLETED", restarts=1)
    assert (again["JobId"], again["Restarts"]) == (name, "1")
    lines = (folder / "events.jsonl").read_text().splitlines()
    events = [json.loads(line)["event"] for line in lines]
    assert [event for event in events if event in ("start", "preempted", "resume", "end")] == [
        "start",
        "preempted",
        "resume",
        "end",
    ]
    assert rows(folder) == rows(sweeps.folder / "alone")
    starts = records_of(folder / "wandb")
    assert len(starts) == 2
    assert len({one_of(records, "run")["run_id"] for records in starts}) == 1
    # SLURM signals W&B's own process too, which ends at once and loses up to a second of rows (0.5 s a step); what it
    # did not accept after that is sent at the next start
    logged = [row for records in starts for row in find_rows(records)]
    missing = set(range(1, 9)) - {row[STEP] for row in logged}
    assert missing <= {1, 2, 3, 4}  # before the preemption
    assert len(missing) <= 2
    counts = Counter((row[STEP], name) for row in logged for name in row if name != STEP)
    assert set(counts.values()) == {1}, "no value is logged twice"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_cancels_the_jobs_and_the_same_command_resumes(
    sweeps: Sweeps, slurm: Cluster, undisturbed: Path
) -> None:
    run = sweeps.start("stopped", TWO, *DDP, records="records_stopped", wait_at_lr=3e-3)
    wait_until((sweeps.folder / "stopped/1/waits").exists, 150)
    wait_until(lambda: sweeps.states("stopped")["0.001"] == "finished", 60)
    run.process.send_signal(signal.SIGINT)
    output = run.end()
    assert run.process.returncode == 130, output
    assert sweeps.states("stopped") == {"0.001": "finished", "0.003": "interrupted"}
    assert slurm.queue() == ""
    exit_code, output = sweeps.run("stopped", TWO, *DDP, records="records_stopped", wait_at_lr=3e-3)
    assert exit_code == 0, output
    assert rows(sweeps.folder / "stopped/1") == rows(undisturbed / "1")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_jobs_of_a_killed_sweep_keep_running_and_the_same_command_follows_them(
    sweeps: Sweeps, undisturbed: Path
) -> None:
    run = sweeps.start("lost", TWO, *DDP, records="records_lost", wait_at_lr=3e-3)
    wait_until((sweeps.folder / "lost/1/waits").exists, 150)
    before = {row["optimizer.lr"]: row["cluster_job"] for row in sweeps.board("lost")}
    run.process.kill()
    run.end()
    (sweeps.folder / "lost/1/was_killed").touch()  # ends its wait
    exit_code, output = sweeps.run("lost", TWO, *DDP, records="records_lost", wait_at_lr=3e-3)
    assert exit_code == 0, output
    assert {row["optimizer.lr"]: row["cluster_job"] for row in sweeps.board("lost")} == before
    for job in ("0", "1"):
        assert rows(sweeps.folder / "lost" / job) == rows(undisturbed / job)
        assert "resume" not in (sweeps.folder / "lost" / job / "events.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_that_crashes_has_failed_and_is_not_requeued(sweeps: Sweeps) -> None:
    exit_code, output = sweeps.run("crashes", "optimizer.lr=1e-3", *DDP, records="records_crashes", raise_at_lr=1e-3)
    assert exit_code == 1, output
    [row] = sweeps.board("crashes")
    assert (row["state"], row["exit_code"]) == ("failed", "1")
    assert "OSError: the disk is gone" in output


def test_the_number_of_devices_on_the_cluster_must_be_set(sweeps: Sweeps) -> None:
    result = run_train(["launcher=slurm", "strategy=ddp"], folder=sweeps.folder)
    assert result.returncode == 2
    assert "type: trainer.devices=<GPUs per node>" in result.stderr
