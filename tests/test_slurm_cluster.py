"""The SLURM of the tests is a real one: it runs tasks, preempts and requeues jobs, and leaves no process behind."""

import os
from pathlib import Path

import pytest
from slurm_cluster import Cluster
from slurm_install import missing

# Marks that it has begun, then waits for the file `go`. SIGTERM reaches the tasks, not the script.
_WAITS = """#!/bin/bash
srun sh -c 'trap "exit 75" TERM; touch begun.$SLURM_PROCID.$SLURM_RESTART_COUNT
while [ ! -e go ]; do sleep 0.05; done'
code=$?
echo $code >> codes
if [ $code = 75 ]; then scontrol requeue $SLURM_JOB_ID; fi
exit $code
"""


def test_two_tasks_in_each_job_of_an_array_of_two_are_four_processes_with_their_own_ranks(
    slurm: Cluster, tmp_path: Path
) -> None:
    command = "echo $SLURM_PROCID of $SLURM_STEP_NUM_TASKS > task.$SLURM_ARRAY_TASK_ID.$SLURM_PROCID"
    array = slurm.submit("--array=0-1", "--ntasks=2", f"--wrap=srun sh -c '{command}'", folder=tmp_path)
    for index in range(2):
        assert slurm.wait(f"{array}_{index}", "COMPLETED")["ExitCode"] == "0:0"
    written = {path.name: path.read_text().strip() for path in tmp_path.glob("task.*")}
    assert written == {f"task.{i}.{rank}": f"{rank} of 2" for i in range(2) for rank in range(2)}


def test_a_preempted_job_that_requeues_itself_runs_again_under_its_id(slurm: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(_WAITS)
    job_id = slurm.submit("--ntasks=2", str(script), folder=tmp_path)
    slurm.wait(job_id, "RUNNING")
    slurm.until(lambda: len(list(tmp_path.glob("begun.*"))) == 2, "two tasks that have begun")
    urgent = slurm.submit("--partition=high", "--ntasks=4", "--wrap=true", folder=tmp_path)
    slurm.wait(urgent, "COMPLETED")
    (tmp_path / "go").touch()
    again = slurm.wait(job_id, "COMPLETED", restarts=1)
    assert (again["JobId"], again["Restarts"], again["ExitCode"]) == (job_id, "1", "0:0")
    assert (tmp_path / "codes").read_text().split() == ["75", "0"]
    begun = {path.name for path in tmp_path.glob("begun.*")}
    assert begun == {"begun.0.", "begun.1.", "begun.0.1", "begun.1.1"}


def test_a_cluster_that_ends_with_a_running_job_leaves_no_process(tmp_path: Path) -> None:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    cluster = Cluster(tmp_path)
    try:
        slurm_job = cluster.submit("--ntasks=2", "--wrap=srun sleep 1000")
        cluster.wait(slurm_job, "RUNNING")
        assert os.getpid() not in cluster.living()
    finally:
        cluster.end()
    assert cluster.living() == []


def test_a_job_that_ends_in_another_state_is_an_error_with_the_logs(slurm: Cluster) -> None:
    job_id = slurm.submit("--wrap=exit 3")
    with pytest.raises(AssertionError, match=r"ExitCode': '3:0'(.|\n)*slurmctld"):
        slurm.wait(job_id, "COMPLETED")
