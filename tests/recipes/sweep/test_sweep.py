"""Sweeps of real runs: each job in its own processes; interrupted jobs are resumed, failed ones are not."""

import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import write_texts
from sweeping import Sweeps, by_job, rows, wait_until

THREE = "optimizer.lr=1e-3,2e-3,3e-3"


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sweeps]:
    folder = tmp_path_factory.mktemp("sweeps")
    sweeps = Sweeps(folder, str(write_texts(folder / "texts")))
    yield sweeps
    for started in sweeps.started:
        started.kill()


@pytest.fixture(scope="module")
def undisturbed(sweeps: Sweeps) -> Path:
    """The folder of a sweep that was not interrupted."""
    exit_code, output = sweeps.run("undisturbed", THREE, records="records_undisturbed")
    assert exit_code == 0, output
    return sweeps.folder / "undisturbed"


@pytest.mark.timeout(600)
def test_every_rank_of_a_job_has_its_folder_and_learning_rate_under_four_strategies(
    sweeps: Sweeps,
) -> None:
    """With `shuffle` each composition has another order, so this fails if a rank composes its config again."""
    exit_code, output = sweeps.run(
        "mixed",
        "recipe=single_bf16,ddp_bf16,fsdp_bf16,zero2_bf16",
        "optimizer.lr=shuffle(1e-3,3e-3)",
        "log_every=1",
        "launcher.devices_per_job=2",
        records="records_mixed",
    )
    assert exit_code == 0, output
    jobs = by_job(sweeps.records("records_mixed"))
    assert len(jobs) == 8, jobs
    by_name = {row["folder"]: row for row in sweeps.board("mixed")}
    for folder, ranks in jobs.items():
        row = by_name[Path(folder).name]
        num_ranks = 1 if row["recipe"] == "single_bf16" else 2
        assert sorted(rank["rank"] for rank in ranks) == list(range(num_ranks)), (folder, ranks)
        assert {rank["world_size"] for rank in ranks} == {num_ranks}
        assert {rank["lr"] for rank in ranks} == {float(row["optimizer.lr"])}
    assert len({(row["recipe"], row["optimizer.lr"]) for row in by_name.values()}) == 8
    # the same batch gives the same curve under every strategy
    for lr in ("0.001", "0.003"):
        losses = [float(row["val_loss"]) for row in by_name.values() if row["optimizer.lr"] == lr]
        # bfloat16 rounds the products of two half batches differently from those of the full batch
        assert max(losses) - min(losses) < 5e-3, losses


def test_both_ranks_of_a_trial_have_one_learning_rate_in_an_unseeded_study(sweeps: Sweeps) -> None:
    exit_code, output = sweeps.run(
        "unseeded",
        "hydra/sweeper=optuna",
        "optimizer.lr=tag(log,interval(1e-4,1e-2))",
        "hydra.sweeper.n_trials=2",
        "hydra.sweeper.seed=null",
        "strategy=ddp",
        "trainer.devices=2",
        records="records_unseeded",
    )
    assert exit_code == 0, output
    jobs = by_job(sweeps.records("records_unseeded"))
    assert [len(ranks) for ranks in jobs.values()] == [2, 2]
    lrs = [{rank["lr"] for rank in ranks} for ranks in jobs.values()]
    assert all(len(of_job) == 1 for of_job in lrs), lrs
    assert len(set.union(*lrs)) == 2


@pytest.mark.timeout(600)
def test_a_crash_and_a_kill_stop_no_other_job_and_the_same_command_resumes_what_was_killed(
    sweeps: Sweeps, undisturbed: Path
) -> None:
    faults = {"raise_at_lr": 1e-3, "kill_at_lr": 2e-3}
    exit_code, output = sweeps.run("faults", THREE, records="records_faults", **faults)
    assert exit_code == 1, output
    assert sweeps.states("faults") == {"0.001": "failed", "0.002": "killed", "0.003": "finished"}
    assert "OSError: the disk is gone" in output
    assert re.search(r"To resume: (PYTHONPATH=\S+ )?python train.py", output)
    finished_at = (sweeps.folder / "faults/2/summary.json").stat().st_mtime_ns

    shutil.rmtree(sweeps.folder / "records_faults")
    exit_code, output = sweeps.run("faults", THREE, records="records_faults", **faults)
    assert exit_code == 1, output
    assert sweeps.states("faults") == {"0.001": "failed", "0.002": "finished", "0.003": "finished"}
    assert [rank["step"] for rank in sweeps.records("records_faults")] == [4], "only this job ran"
    assert rows(sweeps.folder / "faults/1") == rows(undisturbed / "1")
    events = (sweeps.folder / "faults/1/events.jsonl").read_text()
    assert '"event": "resume", "path": "step_0000002.ckpt"' in events
    assert (sweeps.folder / "faults/2/summary.json").stat().st_mtime_ns == finished_at

    # fixed in its source, as another override would make it another job
    (sweeps.folder / "watcher.py").write_text(
        (sweeps.folder / "watcher.py").read_text().replace('raise OSError("the disk is gone")', "return")
    )
    exit_code, output = sweeps.run("faults", THREE, "sweep.retry_failed=true", records="records_faults", **faults)
    assert exit_code == 0, output
    assert set(sweeps.states("faults").values()) == {"finished"}
    assert rows(sweeps.folder / "faults/0") == rows(undisturbed / "0")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("number", "exit_code", "state"),
    [
        (signal.SIGINT, 75, "preempted"),
        (signal.SIGTERM, 75, "preempted"),
        (signal.SIGKILL, -9, "running"),
    ],
)
def test_a_stopped_sweep_leaves_no_process_and_resumes_to_the_same_curves(
    sweeps: Sweeps, undisturbed: Path, number: int, exit_code: int, state: str
) -> None:
    name = f"stopped_{number}"
    run = sweeps.start(name, THREE, records=f"records_{name}", wait_at_lr=2e-3)
    waits, proceed = sweeps.folder / name / "1/waits", sweeps.folder / name / "1/was_killed"
    wait_until(waits.exists)
    run.process.send_signal(number)
    output = run.end()
    wait_until(lambda: not run.left(), 20)
    assert run.process.returncode == exit_code, output
    assert sweeps.states(name) == {"0.001": "finished", "0.002": state, "0.003": "waiting"}
    proceed.touch()
    second_exit_code, output = sweeps.run(name, THREE, records=f"records_{name}", wait_at_lr=2e-3)
    assert second_exit_code == 0, output
    assert "1 already finished, 1 resumed" in output
    for job in range(3):
        assert rows(sweeps.folder / name / str(job)) == rows(undisturbed / str(job)), job


def test_two_jobs_at_a_time_overlap_on_separate_cores(sweeps: Sweeps) -> None:
    exit_code, output = sweeps.run(
        "pair",
        "optimizer.lr=1e-3,3e-3",
        "launcher.max_jobs=2",
        records="records_pair",
        seconds_a_step=2.0,
    )
    assert exit_code == 0, output
    first, second = sorted(sweeps.records("records_pair"), key=lambda rank: rank["began"])
    if len(set(first["cores"]) | set(second["cores"])) > 1:  # a machine with one core shares it
        assert not set(first["cores"]) & set(second["cores"])
    assert second["began"] < first["ended"]
