"""The job pool with scripted jobs: order, slots, failures, pruning, signals and Ctrl-C. No process is started."""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from recipes.config.resolved import ResolvedRun
from recipes.launcher.job import Job, State, read_job
from recipes.runtime import signals
from recipes.sweep import pool as pool_module
from recipes.sweep.pool import Pool

RUNS = None  # a poll of a job that has not ended


class FakeHandle:
    """A job whose polls are scripted; after a signal it ends with the exit code for that signal."""

    def __init__(self, job: Job, polls: Sequence[int | None], on_signal: Mapping[int, int]) -> None:
        self.job = job
        self.signals: list[int] = []
        self.was_killed = False
        self._polls = list(polls)
        self._on_signal = on_signal

    def poll(self) -> int | None:
        if self.was_killed:
            return -signal.SIGKILL
        for number in self.signals:
            if number in self._on_signal:
                return self._on_signal[number]
        return self._polls.pop(0) if len(self._polls) > 1 else self._polls[0]

    def is_waiting(self) -> bool:
        return False

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        self.was_killed = True


class FakeLauncher:
    """Starts at most `max_jobs` scripted jobs at a time."""

    waits = limits_concurrency = True

    def __init__(
        self,
        polls: Mapping[int, Sequence[int | None]],
        *,
        max_jobs: int = 1,
        on_signal: Mapping[int, int] | None = None,
    ) -> None:
        self.max_jobs = max_jobs
        self.handles: dict[int, FakeHandle] = {}
        self.most_at_a_time = 0
        self._polls = polls
        self._on_signal = {signal.SIGINT: 75, signal.SIGTERM: 75} if on_signal is None else on_signal

    def is_full(self) -> bool:
        return len(self._running()) >= self.max_jobs

    def start(self, waiting: Sequence[Job]) -> list[Any]:
        handles = []
        for job in list(waiting)[: self.max_jobs - len(self._running())]:
            handle = FakeHandle(job, self._polls[job.number], self._on_signal)
            self.handles[job.number] = handle
            handles.append(handle)
        self.most_at_a_time = max(self.most_at_a_time, len(self._running()))
        return handles

    def _running(self) -> list[FakeHandle]:
        return [handle for handle in self.handles.values() if handle.job.exit_code is None]


class FakeSource:
    """Supplies given batches of jobs; prunes the jobs with the given numbers."""

    def __init__(self, *batches: Sequence[Job], prunes: Sequence[int] = ()) -> None:
        self.ended: list[int] = []
        self.calls = 0
        self._batches = list(batches)
        self._prunes = prunes

    def next_jobs(self) -> Sequence[Job]:
        self.calls += 1
        return self._batches.pop(0) if self._batches else []

    def job_ended(self, job: Job) -> None:
        self.ended.append(job.number)

    def should_prune(self, job: Job, rows: object) -> bool:
        return job.number in self._prunes


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(pool_module, "_READ_SECONDS", 0.0)
    monkeypatch.setattr(pool_module, "_GRACE_SECONDS", 0.2)


@pytest.fixture
def jobs(tmp_path: Path) -> list[Job]:
    config = {"trainer": {"max_steps": 4}, "mode": {"_target_": "recipes.mode.fit.fit"}}
    return [
        Job(
            number=number,
            folder=tmp_path / str(number),
            overrides=[f"seed={number}"],
            composed=ResolvedRun(config=config, choices={}, run_folder=tmp_path, overrides=[]),
        )
        for number in range(4)
    ]


def make_pool(
    launcher: FakeLauncher,
    source: FakeSource,
    show: Callable[[Mapping[int, Any]], None] = lambda _: None,
) -> tuple[Pool, list[str]]:
    """Return a pool and the list of its events: `<number> <state>`."""
    events: list[str] = []
    pool = Pool(
        launcher,
        source,
        on_change=lambda job: events.append(f"{job.number} {job.state}"),
        show=show,
    )
    return pool, events


def states_on_disk(jobs: Sequence[Job]) -> list[State]:
    return [read_job(job.file).state for job in jobs]


def test_jobs_start_in_order_one_after_the_other(jobs: list[Job]) -> None:
    launcher = FakeLauncher({number: [RUNS, 0] for number in range(3)})
    source = FakeSource(jobs[:3])
    pool, events = make_pool(launcher, source)
    assert pool.run() is None
    assert events == [f"{number} {state}" for number in range(3) for state in ("running", "finished")]
    assert source.ended == [0, 1, 2]
    assert launcher.most_at_a_time == 1


def test_a_free_slot_is_filled_while_another_job_runs(jobs: list[Job]) -> None:
    launcher = FakeLauncher({0: [*[RUNS] * 9, 0], 1: [0], 2: [0], 3: [0]}, max_jobs=2)
    source = FakeSource(jobs)
    pool, _ = make_pool(launcher, source)
    assert pool.run() is None
    assert source.ended == [1, 2, 3, 0]
    assert launcher.most_at_a_time == 2


def test_an_empty_source_is_asked_again_only_after_a_job_has_ended(jobs: list[Job]) -> None:
    launcher = FakeLauncher({0: [*[RUNS] * 9, 0], 1: [0]}, max_jobs=2)
    source = FakeSource([jobs[0]], [], [jobs[1]])
    pool, _ = make_pool(launcher, source)
    assert pool.run() is None
    assert source.ended == [0, 1]
    assert source.calls == 5, "job, none; after job 0: job, none; after job 1: none"


def test_a_source_is_not_asked_again_after_a_job_that_cannot_be_saved(jobs: list[Job]) -> None:
    jobs[1].folder.write_text("")  # no folder can be made here, as on a full disk
    source = FakeSource(jobs[:3], jobs[3:])
    pool, events = make_pool(FakeLauncher({number: [RUNS, 0] for number in range(4)}), source)
    assert pool.run() is None
    assert (source.calls, source.ended, jobs[1].state) == (1, [1, 0, 2], State.UNSAVED)
    assert events == ["0 running", "0 finished", "2 running", "2 finished"]


def test_a_failed_job_stops_no_other_and_each_exit_code_is_recorded(jobs: list[Job]) -> None:
    launcher = FakeLauncher({0: [1], 1: [71], 2: [-9], 3: [0]})
    pool, _ = make_pool(launcher, FakeSource(jobs))
    assert pool.run() is None
    assert [job.exit_code for job in jobs] == [1, 71, -9, 0]
    expected = [State.FAILED, State.OUT_OF_MEMORY, State.KILLED, State.FINISHED]
    assert [job.state for job in jobs] == expected
    assert states_on_disk(jobs) == expected
    assert all(job.seconds is not None for job in jobs)


def test_a_pruned_job_gets_one_sigterm_and_the_next_one_starts(jobs: list[Job]) -> None:
    jobs[0].folder.mkdir()
    (jobs[0].folder / "metrics.csv").write_text("step,val/loss\n1,9.0\n")
    launcher = FakeLauncher({0: [RUNS], 1: [0]})
    pool, _ = make_pool(launcher, FakeSource(jobs[:2], prunes=[0]))
    assert pool.run() is None
    assert launcher.handles[0].signals == [signal.SIGTERM]
    assert [job.state for job in jobs[:2]] == [State.PRUNED, State.FINISHED]


def test_a_job_that_finishes_before_its_pruning_arrives_keeps_its_result(jobs: list[Job]) -> None:
    jobs[0].folder.mkdir()
    (jobs[0].folder / "metrics.csv").write_text("step,val/loss\n1,9.0\n")
    launcher = FakeLauncher({0: [RUNS, RUNS, 0]}, on_signal={})
    pool, _ = make_pool(launcher, FakeSource(jobs[:1], prunes=[0]))
    assert pool.run() is None
    assert launcher.handles[0].signals == [signal.SIGTERM]
    assert jobs[0].state is State.FINISHED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_forwarded_to_running_jobs_and_no_further_job_starts(jobs: list[Job], number: int) -> None:
    sent: list[int] = []

    def send_once(_: object) -> None:
        if not sent:
            sent.append(number)
            os.kill(os.getpid(), number)

    launcher = FakeLauncher({0: [RUNS], 1: [RUNS]}, max_jobs=2)
    pool, _ = make_pool(launcher, FakeSource(jobs), show=send_once)
    assert pool.run() == number
    assert [launcher.handles[job].signals for job in (0, 1)] == [[number]] * 2
    assert [job.state for job in jobs] == [State.PREEMPTED] * 2 + [State.WAITING] * 2


def test_a_second_ctrl_c_kills_the_jobs_that_the_first_one_asked_to_save(
    jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "_SAME_REQUEST_SECONDS", 0.0)

    def interrupt(_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    launcher = FakeLauncher({0: [RUNS]}, on_signal={})
    source = FakeSource(jobs[:2])
    pool, _ = make_pool(launcher, source, show=interrupt)
    assert pool.run() == signal.SIGINT
    assert launcher.handles[0].signals == [signal.SIGINT]
    assert launcher.handles[0].was_killed
    assert (jobs[0].exit_code, jobs[0].state) == (-9, State.INTERRUPTED)
    assert source.ended == [0]
    assert 1 not in launcher.handles, "no further job starts"


def test_an_error_in_the_pool_asks_running_jobs_to_save(jobs: list[Job]) -> None:
    def fail(_: object) -> None:
        raise LookupError("a bug")

    launcher = FakeLauncher({0: [RUNS]})
    pool, _ = make_pool(launcher, FakeSource(jobs[:1]), show=fail)
    with pytest.raises(LookupError):
        pool.run()
    assert launcher.handles[0].signals == [signal.SIGTERM]
    assert jobs[0].state is State.PREEMPTED
