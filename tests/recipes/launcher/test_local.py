"""Which job gets which devices: GPUs by the words that CUDA takes, cores in shares, nothing twice."""

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
    """A job that ends when it is told."""

    def __init__(self, job: Job, room: "local._Room") -> None:
        self.job, self.room = job, room
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
    monkeypatch.setattr("recipes.runtime.world.num_gpus", lambda: 4)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "num_gpus", lambda: 0)
    monkeypatch.setattr(local.os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4, 5})


def local_place(*, devices_per_job: int | None = None, max_jobs: int | None = None) -> Local:
    return Local(devices_per_job=devices_per_job, max_jobs=max_jobs)


def job_of(number: int, *words: str) -> Job:
    composed, mistakes = compose_and_check(words)
    assert not mistakes, list(map(str, mistakes))
    return Job(number=number, folder=Path(str(number)), overrides=list(words), composed=composed)


def rooms(started: list[FakeProcess]) -> list[list[str]]:
    return [one.room.gpus for one in started]


@pytest.mark.usefixtures("four_gpus")
def test_four_single_jobs_take_four_gpus_and_a_fifth_waits_for_the_first_that_is_free() -> None:
    place = local_place()
    jobs = [job_of(number) for number in range(5)]
    started = place.start(jobs)
    assert rooms(started) == [["0"], ["1"], ["2"], ["3"]]
    assert [one.room.environ for one in started] == [
        {"CUDA_VISIBLE_DEVICES": str(n)} for n in range(4)
    ]
    assert place.is_full()
    started[2].exit_code = 1
    assert not place.is_full()
    assert rooms(place.start(jobs[4:])) == [["2"]]


@pytest.mark.usefixtures("four_gpus")
def test_a_job_of_three_gpus_waits_while_smaller_ones_fill_what_is_left() -> None:
    place = local_place()
    words = ("strategy=ddp", "global_batch_size=24")
    first = place.start([job_of(0, *words, "trainer.devices=2")])
    rest = [job_of(1, *words, "trainer.devices=3"), job_of(2), job_of(3)]
    started = place.start(rest)
    assert [one.job.number for one in started] == [2, 3]
    assert rooms(first + started) == [["0", "1"], ["2"], ["3"]]


@pytest.mark.usefixtures("four_gpus")
def test_devices_per_job_is_what_a_job_takes_that_takes_all_and_single_takes_one() -> None:
    place = local_place(devices_per_job=2)
    ddp, single = job_of(0, "strategy=ddp"), job_of(1)
    assert place.words_of(ddp) == ["trainer.devices=2"]
    assert place.words_of(single) == []
    assert place.num_devices(single) == 1
    with pytest.raises(ConfigError, match=r"launcher.devices_per_job=3, or trainer.devices=auto"):
        place.num_devices(job_of(2, "strategy=ddp", "trainer.devices=3", "global_batch_size=24"))


@pytest.mark.usefixtures("four_gpus")
def test_gpus_named_by_number_keep_their_numbers_and_are_not_given_twice() -> None:
    place = local_place()
    [named] = place.start([job_of(0, "strategy=ddp", "trainer.devices=[1,3]")])
    assert named.room.gpus == ["1", "3"]
    assert named.room.environ == {}, "the numbers mean what they meant"
    assert rooms(place.start([job_of(1), job_of(2), job_of(3)])) == [["0"], ["2"]]


def test_gpus_that_are_visible_are_shared_out_by_their_own_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5b,GPU-7c,-1,GPU-9e")
    monkeypatch.setattr(local, "num_gpus", lambda: 2)
    monkeypatch.setattr("recipes.runtime.world.num_gpus", lambda: 2)
    place = local_place()
    assert rooms(place.start([job_of(0), job_of(1), job_of(2)])) == [["GPU-5b"], ["GPU-7c"]]


@pytest.mark.usefixtures("no_gpu")
def test_on_a_cpu_one_job_has_all_cores_and_three_have_a_third_each() -> None:
    alone = local_place().start([job_of(0), job_of(1)])
    assert [one.room.environ["RECIPES_CORES"] for one in alone] == ["0,1,2,3,4,5"]
    place = local_place(max_jobs=3)
    three = place.start([job_of(0), job_of(1), job_of(2), job_of(3)])
    assert [one.room.environ["RECIPES_CORES"] for one in three] == ["0,1", "2,3", "4,5"]
    three[1].exit_code = 0
    assert place.start([job_of(3)])[0].room.environ["RECIPES_CORES"] == "2,3"


@pytest.mark.usefixtures("no_gpu")
def test_more_jobs_than_cores_have_one_core_each() -> None:
    place = local_place(max_jobs=8)
    started = place.start([job_of(number) for number in range(8)])
    assert [one.room.environ["RECIPES_CORES"] for one in started] == list("01234501")


@pytest.mark.usefixtures("four_gpus")
def test_on_gpus_max_jobs_leaves_some_free() -> None:
    place = local_place(max_jobs=2)
    assert rooms(place.start([job_of(number) for number in range(4)])) == [["0"], ["1"]]


def test_a_job_is_nobodys_rank() -> None:
    ours = {
        "HOME": "/root",
        "SLURM_CONF": "slurm.conf",
        "WANDB_API_KEY": "key",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    theirs = dict.fromkeys(
        ("RANK", "WORLD_SIZE", "MASTER_PORT", "SLURM_PROCID", "TORCHELASTIC_RUN_ID"), "1"
    )
    theirs |= {"PL_GLOBAL_SEED": "1", "WANDB_RUN_ID": "abc", RANK_FILE: "composed.json"}
    assert clean_environ(ours | theirs) == ours


def test_slurm_is_forgotten_when_asked_and_not_before() -> None:
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURMD_NODENAME": "n1",
        "HOME": "/root",
        "SLURM_CONF": "c",
    }
    forget_slurm(["recipe=ddp_bf16", "ignore_slurm=false"], environ)
    assert environ["SLURM_JOB_ID"] == "7"
    forget_slurm(["ignore_slurm=True"], environ)
    assert environ == {"HOME": "/root", "SLURM_CONF": "c"}


def test_a_list_of_gpus_on_a_machine_without_one_is_a_machine_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(local, "num_gpus", lambda: 0)
    assert "cores" in local_place().describe()
