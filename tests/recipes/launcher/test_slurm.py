"""Runs and sweeps on a real SLURM: arrays, preemption and requeue, what Ctrl-C or a lost shell leaves."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import Cluster
from support import run_train, write_texts
from sweeping import Sweeps, by_job, rows, wait_until

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
    sweeps: Sweeps, slurm: Cluster, undisturbed: Path
) -> None:
    words = [*DDP, "optimizer.lr=3e-3", "logger=wandb"]
    run = sweeps.start_run("preempted", *words, wait_at_lr=3e-3)
    said = run.end()
    assert run.process.returncode == 0, said
    folder = sweeps.folder / "preempted"
    name = json.loads((folder / "job.json").read_text())["cluster_job"]
    assert f"Submitted as job {name}" in said
    wait_until((folder / "waits").exists, 120)
    urgent = slurm.submit("--partition=high", "--ntasks=4", "--wrap=true", folder=sweeps.folder)
    slurm.until(lambda: slurm.job(urgent)["JobState"] != "RUNNING", "the urgent job is taken in")
    (folder / "was_killed").touch()  # the step under way ends
    slurm.wait(urgent, "COMPLETED")
    again = slurm.wait(name, "COMPLETED", restarts=1)
    assert again["Restarts"] == "1"
    events = [
        json.loads(line)["event"] for line in (folder / "events.jsonl").read_text().splitlines()
    ]
    assert events.count("start") == 1
    assert "preempted" in events
    assert "resume" in events
    assert rows(folder) == rows(undisturbed / "1")
    assert len({path.name.split("-")[-1] for path in (folder / "wandb").glob("offline-run-*")}) == 1
    assert len(list((folder / "wandb").glob("offline-run-*"))) == 2


@pytest.mark.timeout(600)
def test_ctrl_c_takes_the_jobs_out_of_the_queue_and_a_lost_shell_leaves_them_to_be_found(
    sweeps: Sweeps, slurm: Cluster, undisturbed: Path
) -> None:
    name, goes_on = "shells", sweeps.folder / "shells/1/was_killed"
    run = sweeps.start(name, TWO, *DDP, told="told_shells", wait_at_lr=3e-3)
    wait_until((sweeps.folder / name / "1/waits").exists, 150)
    wait_until(lambda: sweeps.states(name)["0.001"] == "finished", 60)
    run.process.send_signal(signal.SIGINT)
    goes_on.touch()
    said = run.end()
    assert run.process.returncode == 130, said
    assert sweeps.states(name)["0.003"] in ("interrupted", "killed"), said
    assert slurm.queue() == []
    goes_on.unlink()
    (sweeps.folder / name / "1/waits").unlink()

    run = sweeps.start(name, TWO, *DDP, told="told_shells", wait_at_lr=3e-3)
    wait_until((sweeps.folder / name / "1/waits").exists, 150)
    before = {row["optimizer.lr"]: row["cluster_job"] for row in sweeps.board(name)}
    run.process.kill()
    run.end()
    goes_on.touch()
    exit_code, said = sweeps.run(name, TWO, *DDP, told="told_shells", wait_at_lr=3e-3)
    assert exit_code == 0, said
    assert {row["optimizer.lr"]: row["cluster_job"] for row in sweeps.board(name)} == before
    for job in ("0", "1"):
        assert rows(sweeps.folder / name / job) == rows(undisturbed / job)


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
