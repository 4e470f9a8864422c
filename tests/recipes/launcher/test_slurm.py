"""Runs and sweeps on a real SLURM: arrays, preemption and requeue, what Ctrl-C or a lost shell leaves."""

import json
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import Cluster
from support import run_train, write_texts
from sweeping import Sweeps, by_job, rows, wait_until

from recipes.logger.wandb.resume import STEP
from tests.recipes.logger.test_wandb import find_rows, one_of, records_of

DDP = ("launcher=slurm", "launcher.partition=low", "strategy=ddp", "trainer.devices=2")
TWO = "optimizer.lr=1e-3,3e-3"


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory, slurm: Cluster) -> Iterator[Sweeps]:
    folder = tmp_path_factory.mktemp("on_slurm")
    sweeps = Sweeps(folder, str(write_texts(folder / "texts")), environ=slurm.environment)
    yield sweeps
    for one in sweeps.started:
        one.kill()


@pytest.fixture(scope="module")
def undisturbed(sweeps: Sweeps) -> Path:
    """The same two jobs on this machine, without SLURM."""
    exit_code, said = sweeps.run(
        "local", TWO, "strategy=ddp", "trainer.devices=2", told="told_local"
    )
    assert exit_code == 0, said
    return sweeps.folder / "local"


@pytest.mark.timeout(600)
def test_a_sweep_is_one_array_whose_jobs_have_two_tasks_each_and_the_curves_of_this_machine(
    sweeps: Sweeps, undisturbed: Path
) -> None:
    exit_code, said = sweeps.run("array", TWO, *DDP, told="told_array")
    assert exit_code == 0, said
    board = sweeps.board("array")
    assert [row["state"] for row in board] == ["finished", "finished"]
    arrays = {row["cluster_job"].split("_")[0] for row in board}
    assert len(arrays) == 1
    assert sorted(row["cluster_job"].split("_")[1] for row in board) == ["0", "1"]
    for folder, ranks in by_job(sweeps.told("told_array")).items():
        assert sorted(one["rank"] for one in ranks) == [0, 1], folder
        assert sorted(one["SLURM_PROCID"] for one in ranks) == ["0", "1"]
    for job in ("0", "1"):
        assert rows(sweeps.folder / "array" / job) == rows(undisturbed / job)


@pytest.mark.timeout(600)
def test_a_submitted_run_that_makes_way_goes_on_in_its_folder_under_its_wandb_id_to_the_same_curve(
    sweeps: Sweeps, slurm: Cluster
) -> None:
    run_of_8 = ("optimizer.lr=3e-3", "trainer.max_steps=8", "logger=wandb")
    alone = sweeps.start_run("alone", "strategy=ddp", "trainer.devices=2", *run_of_8)
    said = alone.end()
    assert alone.process.returncode == 0, said
    # steps of a length that ranks can agree in on the one to stop after
    run = sweeps.start_run("preempted", *DDP, *run_of_8, wait_at_lr=3e-3, seconds_a_step=0.5)
    said = run.end()
    assert run.process.returncode == 0, said
    folder = sweeps.folder / "preempted"
    name = json.loads((folder / "job.json").read_text())["cluster_job"]
    assert f"Submitted as job {name}" in said
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
    told = [row for records in starts for row in find_rows(records)]
    missing = set(range(1, 9)) - {row[STEP] for row in told}
    assert missing <= {1, 2, 3, 4}  # before the preemption
    assert len(missing) <= 2
    numbers = Counter((row[STEP], name) for row in told for name in row if name != STEP)
    assert set(numbers.values()) == {1}, "nothing twice"


@pytest.mark.timeout(600)
def test_ctrl_c_takes_the_jobs_out_of_the_queue_and_the_same_command_goes_on(
    sweeps: Sweeps, slurm: Cluster, undisturbed: Path
) -> None:
    run = sweeps.start("stopped", TWO, *DDP, told="told_stopped", wait_at_lr=3e-3)
    wait_until((sweeps.folder / "stopped/1/waits").exists, 150)
    wait_until(lambda: sweeps.states("stopped")["0.001"] == "finished", 60)
    run.process.send_signal(signal.SIGINT)
    said = run.end()
    assert run.process.returncode == 130, said
    assert sweeps.states("stopped") == {"0.001": "finished", "0.003": "interrupted"}
    assert slurm.queue() == ""
    exit_code, said = sweeps.run("stopped", TWO, *DDP, told="told_stopped", wait_at_lr=3e-3)
    assert exit_code == 0, said
    assert rows(sweeps.folder / "stopped/1") == rows(undisturbed / "1")


@pytest.mark.timeout(600)
def test_jobs_whose_shell_is_lost_run_on_and_the_same_command_finds_them(
    sweeps: Sweeps, undisturbed: Path
) -> None:
    run = sweeps.start("lost", TWO, *DDP, told="told_lost", wait_at_lr=3e-3)
    wait_until((sweeps.folder / "lost/1/waits").exists, 150)
    before = {row["optimizer.lr"]: row["cluster_job"] for row in sweeps.board("lost")}
    run.process.kill()
    run.end()
    (sweeps.folder / "lost/1/was_killed").touch()  # it goes on
    exit_code, said = sweeps.run("lost", TWO, *DDP, told="told_lost", wait_at_lr=3e-3)
    assert exit_code == 0, said
    assert {row["optimizer.lr"]: row["cluster_job"] for row in sweeps.board("lost")} == before
    for job in ("0", "1"):
        assert rows(sweeps.folder / "lost" / job) == rows(undisturbed / job)
        assert "resume" not in (sweeps.folder / "lost" / job / "events.jsonl").read_text()


@pytest.mark.timeout(300)
def test_a_job_that_crashes_on_slurm_is_failed_and_not_queued_again(sweeps: Sweeps) -> None:
    exit_code, said = sweeps.run(
        "crashes", "optimizer.lr=1e-3", *DDP, told="told_crashes", raise_at_lr=1e-3
    )
    assert exit_code == 1, said
    [row] = sweeps.board("crashes")
    assert (row["state"], row["exit_code"]) == ("failed", "1")
    assert "OSError: the disk is gone" in said


def test_devices_that_cannot_be_counted_from_here_are_asked_for(sweeps: Sweeps) -> None:
    done = run_train(["launcher=slurm", "strategy=ddp"], folder=sweeps.folder)
    assert done.returncode == 2
    assert "type: trainer.devices=<GPUs a node>" in done.stderr
