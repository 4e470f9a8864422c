"""A pipeline whose stages are jobs of a real SLURM: preempted, and without the process that follows them."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import Cluster
from sweeping import wait_until

from tests.recipes.pipeline.test_pipeline import Pipelines, assert_equal_runs, read_state

ON_SLURM = ("launcher=slurm", "launcher.partition=low")


@pytest.fixture
def pipelines(tmp_path: Path, slurm: Cluster) -> Iterator[Pipelines]:
    pipelines = Pipelines(tmp_path, environ=slurm.environment)
    yield pipelines
    for started in pipelines.started:
        started.kill()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_preempted_stage_goes_on_under_its_job_id_and_the_same_command_follows_it_to_the_same_bits(
    pipelines: Pipelines, slurm: Cluster
) -> None:
    exit_code, output = pipelines.run("here")
    assert exit_code == 0, output

    folder, waits = pipelines.folder / "there", "+stages.second.callbacks.watcher.wait_at_lr=2e-3"
    started = pipelines.start("there", waits, *ON_SLURM)
    wait_until(lambda: (folder / "2_second/waits").exists() or started.process.poll() is not None)
    jobs = {name: stage["cluster_job"] for name, stage in read_state(folder).items()}
    assert [*jobs] == ["pretrain", "second"]
    assert len({*jobs.values()}) == 2, "a job for each stage"
    started.process.send_signal(signal.SIGKILL)
    started.end()
    urgent = slurm.submit("--partition=high", "--ntasks=4", "--wrap=true", folder=pipelines.folder)
    slurm.wait(urgent, "COMPLETED")
    (folder / "2_second/was_killed").touch()  # ends its wait

    exit_code, output = pipelines.run("there", waits, *ON_SLURM)
    assert exit_code == 0, output
    assert "stage 1 of 3: pretrain: finished before" in output
    stages = read_state(folder)
    assert {name: stages[name]["cluster_job"] for name in jobs} == jobs, "no second job in the folder of the first"
    assert '"event": "resume"' in (folder / "2_second/events.jsonl").read_text()
    for stage in ("1_pretrain", "2_second"):
        assert_equal_runs(folder / stage, pipelines.folder / "here" / stage)
