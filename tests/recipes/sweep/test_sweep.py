"""Sweeps of real runs: every job its own tree of processes; what is cut goes on, what has failed is left alone."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import write_texts
from sweeping import Sweeps, rows, wait_until

THREE = "optimizer.lr=1e-3,2e-3,3e-3"


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sweeps]:
    folder = tmp_path_factory.mktemp("sweeps")
    sweeps = Sweeps(folder, str(write_texts(folder / "texts")))
    yield sweeps
    for one in sweeps.started:
        one.kill()


@pytest.fixture(scope="module")
def undisturbed(sweeps: Sweeps) -> Path:
    """The folder of a sweep that nothing happened to."""
    exit_code, said = sweeps.run("undisturbed", THREE, told="told_undisturbed")
    assert exit_code == 0, said
    return sweeps.folder / "undisturbed"


@pytest.mark.timeout(600)
def test_every_rank_of_a_job_has_its_folder_and_learning_rate_under_four_strategies(
    sweeps: Sweeps,
) -> None:
    """`shuffle` gives every process that composes for itself another order: nothing may compose twice."""
    exit_code, said = sweeps.run(
        "mixed",
        "recipe=single_bf16,ddp_bf16,fsdp_bf16,zero2_bf16",
        "optimizer.lr=shuffle(1e-3,3e-3)",
        "log_every=1",
        "launcher.devices_per_job=2",
        told="told_mixed",
    )
    assert exit_code == 0, said
    told = sweeps.told("told_mixed")
    jobs = {
        str(folder): [one for one in told if one["run_folder"] == folder]
        for folder in {one["run_folder"] for one in told}
    }
    assert len(jobs) == 8, jobs
    by_name = {row["folder"]: row for row in sweeps.board("mixed")}
    for folder, ranks in jobs.items():
        row = by_name[Path(folder).name]
        num_ranks = 1 if row["recipe"] == "single_bf16" else 2
        assert sorted(one["rank"] for one in ranks) == list(range(num_ranks)), (folder, ranks)
        assert {one["world_size"] for one in ranks} == {num_ranks}
        assert {one["lr"] for one in ranks} == {float(row["optimizer.lr"])}
    assert len({(row["recipe"], row["optimizer.lr"]) for row in by_name.values()}) == 8
    # the same batch, the same curve, whatever carries it out
    for lr in ("0.001", "0.003"):
        losses = [float(row["val_loss"]) for row in by_name.values() if row["optimizer.lr"] == lr]
        # bfloat16 rounds the products of two halves of a batch otherwise than of the whole
        assert max(losses) - min(losses) < 5e-3, losses


def test_an_unseeded_study_gives_both_ranks_of_a_trial_one_learning_rate(sweeps: Sweeps) -> None:
    exit_code, said = sweeps.run(
        "unseeded",
        "hydra/sweeper=optuna",
        "optimizer.lr=tag(log,interval(1e-4,1e-2))",
        "hydra.sweeper.n_trials=2",
        "hydra.sweeper.seed=null",
        "strategy=ddp",
        "trainer.devices=2",
        told="told_unseeded",
    )
    assert exit_code == 0, said
    told = sweeps.told("told_unseeded")
    by_folder = {
        folder: {one["lr"] for one in told if one["run_folder"] == folder}
        for folder in {one["run_folder"] for one in told}
    }
    assert len(told) == 4
    assert len(by_folder) == 2
    assert all(len(lrs) == 1 for lrs in by_folder.values()), by_folder
    assert len({lr for lrs in by_folder.values() for lr in lrs}) == 2


@pytest.mark.timeout(600)
def test_a_crash_and_a_kill_stop_no_other_job_and_the_same_command_resumes_what_was_killed(
    sweeps: Sweeps, undisturbed: Path
) -> None:
    faults = {"raise_at_lr": 1e-3, "kill_at_lr": 2e-3}
    exit_code, said = sweeps.run("faults", THREE, told="told_faults", **faults)
    assert exit_code == 1, said
    assert sweeps.states("faults") == {"0.001": "failed", "0.002": "killed", "0.003": "finished"}
    assert "OSError: the disk is gone" in said
    assert "To go on: python train.py" in said
    finished_at = (sweeps.folder / "faults/2/summary.json").stat().st_mtime_ns

    shutil.rmtree(sweeps.folder / "told_faults")
    exit_code, said = sweeps.run("faults", THREE, told="told_faults", **faults)
    assert exit_code == 1, said
    assert sweeps.states("faults") == {"0.001": "failed", "0.002": "finished", "0.003": "finished"}
    assert [one["step"] for one in sweeps.told("told_faults")] == [4], "it alone ran"
    assert rows(sweeps.folder / "faults/1") == rows(undisturbed / "1")
    events = (sweeps.folder / "faults/1/events.jsonl").read_text()
    assert '"event": "resume", "path": "step_0000002.ckpt"' in events
    assert (sweeps.folder / "faults/2/summary.json").stat().st_mtime_ns == finished_at

    # another callback would be another job: the fault is taken away from where it lies
    (sweeps.folder / "watcher.py").write_text(
        (sweeps.folder / "watcher.py")
        .read_text()
        .replace('raise OSError("the disk is gone")', "return")
    )
    exit_code, said = sweeps.run(
        "faults", THREE, "sweep.retry_failed=true", told="told_faults", **faults
    )
    assert exit_code == 0, said
    assert set(sweeps.states("faults").values()) == {"finished"}
    assert rows(sweeps.folder / "faults/0") == rows(undisturbed / "0")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("number", "exit_code", "state"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 75, "preempted"),
        (signal.SIGKILL, -9, "running"),
    ],
)
def test_a_sweep_that_is_stopped_leaves_no_process_and_goes_on_to_the_same_curves(
    sweeps: Sweeps, undisturbed: Path, number: int, exit_code: int, state: str
) -> None:
    name = f"stopped_{number}"
    run = sweeps.start(name, THREE, told=f"told_{name}", wait_at_lr=2e-3)
    waits, goes_on = sweeps.folder / name / "1/waits", sweeps.folder / name / "1/was_killed"
    wait_until(waits.exists)
    run.process.send_signal(number)
    said = run.end()
    wait_until(lambda: not run.left(), 20)
    assert run.process.returncode == exit_code, said
    assert sweeps.states(name) == {"0.001": "finished", "0.002": state, "0.003": "waiting"}
    goes_on.touch()
    ended, said = sweeps.run(name, THREE, told=f"told_{name}", wait_at_lr=2e-3)
    assert ended == 0, said
    assert "1 over from an earlier start, 1 going on where cut" in said
    for job in range(3):
        assert rows(sweeps.folder / name / str(job)) == rows(undisturbed / str(job)), job


def test_two_jobs_at_a_time_overlap_and_have_cores_of_their_own(sweeps: Sweeps) -> None:
    exit_code, said = sweeps.run(
        "pair",
        "optimizer.lr=1e-3,3e-3",
        "launcher.max_jobs=2",
        told="told_pair",
        seconds_a_step=2.0,
    )
    assert exit_code == 0, said
    first, second = sorted(sweeps.told("told_pair"), key=lambda one: one["began"])
    if len(set(first["cores"]) | set(second["cores"])) > 1:  # a machine with one core shares it
        assert not set(first["cores"]) & set(second["cores"])
    assert second["began"] < first["ended"]
