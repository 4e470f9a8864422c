"""Which job gets which devices: GPUs by their CUDA names, an equal share of the cores, nothing twice."""

import subprocess
import sys
from pathlib import Path

import pytest

from recipes.config import compose_and_check
from recipes.errors import ConfigError
from recipes.launcher import local
from recipes.launcher.environ import clean_environ, forget_slurm
from recipes.launcher.job import Job
from recipes.launcher.local import Local
from recipes.runtime.world import RANK_FILE


class FakeProcess:
    """A job that ends when the test sets its exit code."""

    def __init__(self, job: Job, resources: "local._Resources") -> None:
        self.job, self.resources = job, resources
        self.exit_code: int | None = None

    def poll(self) -> int | None:
        return self.exit_code


@pytest.fixture(autouse=True)
def _processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_Process", FakeProcess)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "num_gpus", lambda: 4)
    monkeypatch.setattr("recipes.config.ranks.num_gpus", lambda: 4)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "num_gpus", lambda: 0)
    monkeypatch.setattr(local.os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5})


def make_launcher(*, devices_per_job: int | None = None, max_jobs: int | None = None) -> Local:
    return Local(devices_per_job=devices_per_job, max_jobs=max_jobs)


def make_job(number: int, *overrides: str) -> Job:
    composed, mistakes = compose_and_check(overrides)
    assert not mistakes, list(map(str, mistakes))
    folder = Path(str(number))
    return Job(number=number, folder=folder, overrides=list(overrides), composed=composed)


def gpus_of_each(started: list[FakeProcess]) -> list[list[str]]:
    return [process.resources.gpus for process in started]


@pytest.mark.usefixtures("four_gpus")
def test_four_jobs_use_four_gpus_and_a_fifth_waits_for_the_first_free_one() -> None:
    launcher = make_launcher()
    jobs = [make_job(number) for number in range(5)]
    started = launcher.start(jobs)
    assert gpus_of_each(started) == [["0"], ["1"], ["2"], ["3"]]
    assert [process.resources.environ for process in started] == [{"CUDA_VISIBLE_DEVICES": str(n)} for n in range(4)]
    assert launcher.is_full()
    started[2].exit_code = 1
    assert not launcher.is_full()
    assert gpus_of_each(launcher.start(jobs[4:])) == [["2"]]


@pytest.mark.usefixtures("four_gpus")
def test_a_job_of_three_gpus_waits_while_smaller_jobs_use_the_free_gpus() -> None:
    launcher = make_launcher()
    overrides = ("strategy=ddp", "global_batch_size=24")
    first = launcher.start([make_job(0, *overrides, "trainer.devices=2")])
    rest = [make_job(1, *overrides, "trainer.devices=3"), make_job(2), make_job(3)]
    started = launcher.start(rest)
    assert [process.job.number for process in started] == [2, 3]
    assert gpus_of_each(first + started) == [["0", "1"], ["2"], ["3"]]


@pytest.mark.usefixtures("four_gpus")
def test_devices_per_job_limits_a_job_that_would_use_all_devices_and_single_device_uses_one() -> None:
    launcher = make_launcher(devices_per_job=2)
    ddp, single = make_job(0, "strategy=ddp"), make_job(1)
    assert launcher.extra_overrides(ddp) == ["trainer.devices=2"]
    assert launcher.extra_overrides(single) == []
    assert launcher.num_devices(single) == 1
    with pytest.raises(ConfigError, match=r"launcher.devices_per_job=3, or trainer.devices=auto"):
        launcher.num_devices(make_job(2, "strategy=ddp", "trainer.devices=3", "global_batch_size=24"))


@pytest.mark.usefixtures("four_gpus")
def test_gpus_selected_by_index_keep_their_indices_and_are_not_used_twice() -> None:
    launcher = make_launcher()
    [named] = launcher.start([make_job(0, "strategy=ddp", "trainer.devices=[1,3]")])
    assert named.resources.gpus == ["1", "3"]
    assert named.resources.environ == {}, "all GPUs stay visible, so that the indices stay valid"
    assert gpus_of_each(launcher.start([make_job(1), make_job(2), make_job(3)])) == [["0"], ["2"]]


def test_visible_gpus_are_distributed_by_their_names_up_to_the_first_minus_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5b,GPU-7c,-1,GPU-9e")
    monkeypatch.setattr(local, "num_gpus", lambda: 2)
    monkeypatch.setattr("recipes.config.ranks.num_gpus", lambda: 2)
    launcher = make_launcher()
    assert gpus_of_each(launcher.start([make_job(0), make_job(1), make_job(2)])) == [
        ["GPU-5b"],
        ["GPU-7c"],
    ]


@pytest.mark.usefixtures("no_gpu")
def test_on_a_cpu_one_job_has_all_cores_and_three_jobs_have_a_third_each() -> None:
    alone = make_launcher().start([make_job(0), make_job(1)])
    assert [process.resources.environ["RECIPES_CORES"] for process in alone] == ["0,1,2,3,4,5"]
    launcher = make_launcher(max_jobs=3)
    three = launcher.start([make_job(0), make_job(1), make_job(2), make_job(3)])
    assert [process.resources.environ["RECIPES_CORES"] for process in three] == [
        "0,1",
        "2,3",
        "4,5",
    ]
    three[1].exit_code = 0
    assert launcher.start([make_job(3)])[0].resources.environ["RECIPES_CORES"] == "2,3"


@pytest.mark.usefixtures("no_gpu")
def test_with_more_jobs_than_cores_each_has_one_core() -> None:
    launcher = make_launcher(max_jobs=8)
    started = launcher.start([make_job(number) for number in range(8)])
    assert [process.resources.environ["RECIPES_CORES"] for process in started] == list("01234501")


@pytest.mark.usefixtures("four_gpus")
def test_max_jobs_limits_jobs_on_gpus_too() -> None:
    launcher = make_launcher(max_jobs=2)
    assert gpus_of_each(launcher.start([make_job(number) for number in range(4)])) == [["0"], ["1"]]


def test_a_job_inherits_no_variables_of_a_rank_or_of_slurm() -> None:
    kept = {
        "HOME": "/root",
        "SLURM_CONF": "slurm.conf",
        "WANDB_API_KEY": "key",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    removed = dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_PORT", "SLURM_PROCID", "TORCHELASTIC_RUN_ID"), "1")
    removed |= {"PL_GLOBAL_SEED": "1", "WANDB_RUN_ID": "abc", RANK_FILE: "composed.json"}
    assert clean_environ(kept | removed) == kept


def test_slurm_variables_are_removed_only_with_ignore_slurm() -> None:
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURMD_NODENAME": "n1",
        "HOME": "/root",
        "SLURM_CONF": "c",
        "PMI_SIZE": "2",  # srun sets it, too
        "PMIX_RANK": "1",
    }
    forget_slurm(["recipe=ddp_bf16", "ignore_slurm=false"], environ)
    assert environ["SLURM_JOB_ID"] == "7"
    forget_slurm(["ignore_slurm=True"], environ)
    assert environ == {"HOME": "/root", "SLURM_CONF": "c"}


def test_cuda_visible_devices_on_a_machine_without_gpus_is_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(local, "num_gpus", lambda: 0)
    assert "cores" in make_launcher().describe()


def test_a_job_whose_file_is_damaged_ends_with_what_to_type(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"number": 1}')
    command = [sys.executable, "-m", "recipes.launcher.job_main", str(tmp_path / "job.json")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    lines = ended.stderr.splitlines()[-3:]
    assert lines[0] == f"1. {tmp_path}/job.json"
    assert lines[1].strip().startswith("the file of a job is damaged")
    assert lines[2].strip() == f"type: rm {tmp_path}/job.json, and the same command; the job starts again as a new one"
