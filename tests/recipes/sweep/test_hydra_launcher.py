"""The Hydra launcher with a fake sweep: invalid configs, the result of each job, folder names. Nothing is started."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.utils import JobStatus
from omegaconf import OmegaConf

from recipes.errors import ConfigError, ConfigErrors
from recipes.launcher.job import Job, State
from recipes.sweep.hydra_launcher import SubprocessLauncher
from recipes.sweep.session import MULTIRUN

INVALID = ConfigError("seed=-1", "a seed is not negative", "seed=1")
GRID, STUDY = "hydra.BasicSweeper", "another.Sweeper"


class FakeSweep:
    """A sweep whose jobs have scripted ends; jobs with `seed=-1` have an invalid config."""

    def __init__(self, folder: Path, ends: dict[int, State], *, skip_invalid: bool) -> None:
        self.folder = folder
        self.settings = SimpleNamespace(skip_invalid=skip_invalid, objective="best_val_loss")
        self.launcher = SimpleNamespace(describe=lambda: "nowhere")
        self.exit_code = 0
        self.started: list[int] = []
        self.rejected: list[int] = []
        self._ends = ends

    def prepare(
        self, overrides: Sequence[str], number: int, get_folder_name: Callable[[int], str]
    ) -> tuple[Job, list[ConfigError]]:
        folder = self.folder / get_folder_name(number)
        job = Job(number=number, folder=folder, overrides=list(overrides))
        return job, [INVALID] if "seed=-1" in overrides else []

    def should_start(self, job: Job) -> bool:
        return job.state is State.WAITING

    def reject(self, job: Job, mistakes: Sequence[ConfigError]) -> None:
        job.state = State.REFUSED
        self.rejected.append(job.number)

    def run(self, source: Any) -> int:
        while jobs := source.next_jobs():
            for job in jobs:
                self.started.append(job.number)
                job.state = self._ends[job.number]
                job.folder.mkdir(parents=True)
                if job.state is State.FINISHED:
                    summary = json.dumps({"best_val_loss": 2.5})
                    (job.folder / "summary.json").write_text(summary)
        return self.exit_code


@pytest.fixture(autouse=True)
def _new_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MULTIRUN, "exit_code", 0)


def make_launcher(
    sweep: FakeSweep,
    monkeypatch: pytest.MonkeyPatch,
    *,
    sweeper: str = GRID,
    subdir: str = "${hydra.job.num}",
) -> SubprocessLauncher:
    launcher = SubprocessLauncher()

    def load_sweep_config(_: object, overrides: list[str]) -> Any:
        values = OmegaConf.from_dotlist(overrides)
        return OmegaConf.merge(values, {"hydra": {"job": {}, "sweep": {"subdir": subdir}}})

    hydra = {
        "sweep": {"dir": str(sweep.folder), "subdir": subdir},
        "sweeper": {"_target_": sweeper},
    }
    context: Any = SimpleNamespace(config_loader=SimpleNamespace(load_sweep_config=load_sweep_config))
    launcher.setup(
        hydra_context=context,
        task_function=lambda _: None,
        config=OmegaConf.create({"hydra": hydra}),
    )
    monkeypatch.setattr(launcher, "open_sweep", lambda: sweep)
    return launcher


def test_an_invalid_config_starts_no_job_and_is_reported_once_with_the_numbers_of_its_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = FakeSweep(tmp_path, {}, skip_invalid=False)
    launcher = make_launcher(sweep, monkeypatch)
    with pytest.raises(ConfigErrors) as caught:
        launcher.launch([["seed=1"], ["seed=-1"], ["seed=-1", "lr=2"]], 0)
    assert list(map(str, caught.value.mistakes)) == [str(INVALID)]
    assert "2 of 3 jobs (1, 2) is invalid; nothing was started" in caught.value.head
    assert (sweep.started, sweep.rejected) == ([], [])


def test_with_skip_invalid_the_valid_jobs_run_and_the_others_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = FakeSweep(tmp_path, {0: State.FINISHED, 2: State.FINISHED}, skip_invalid=True)
    results = make_launcher(sweep, monkeypatch).launch([["seed=1"], ["seed=-1"], ["seed=2"]], 0)
    assert (sweep.started, sweep.rejected) == ([0, 2], [1])
    assert "retry_failed" not in capsys.readouterr().out  # its config would be as invalid
    assert [result.overrides for result in results] == [["seed=1"], ["seed=-1"], ["seed=2"]]


def test_a_job_that_repeats_another_one_is_run_once_and_has_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = FakeSweep(tmp_path, {0: State.FINISHED, 2: State.FINISHED}, skip_invalid=False)
    # -m seed=1,1,2 lr=3
    results = make_launcher(sweep, monkeypatch).launch([["seed=1", "lr=3"], ["lr=3", "seed=1"], ["seed=2", "lr=3"]], 0)
    assert sweep.started == [0, 2]
    assert [result.return_value for result in results] == [2.5, 2.5, 2.5]
    printed = capsys.readouterr().out
    assert "job 1 would repeat job 0 and is not run" in printed
    assert "Sweep: 2 jobs" in printed


@pytest.mark.parametrize("sweeper", [GRID, STUDY])
def test_a_finished_job_returns_its_objective_and_a_failed_one_an_error_only_to_a_sweeper_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sweeper: str
) -> None:
    sweep = FakeSweep(tmp_path, {4: State.FINISHED, 5: State.FAILED}, skip_invalid=False)
    sweep.exit_code = 1
    launcher = make_launcher(sweep, monkeypatch, sweeper=sweeper)
    finished, failed = launcher.launch([["seed=1"], ["seed=2"]], 4)
    assert (finished.status, finished.return_value) == (JobStatus.COMPLETED, 2.5)
    assert finished.working_dir == str(tmp_path / "4")
    if sweeper == GRID:  # which would otherwise stop the sweep at the first failed job
        assert (failed.status, failed.return_value) == (JobStatus.COMPLETED, None)
    else:
        assert failed.status is JobStatus.FAILED
        with pytest.raises(RuntimeError, match="job 5 failed"):
            _ = failed.return_value
    assert MULTIRUN.exit_code == 1


@pytest.mark.parametrize("exit_code", [75, 143])
def test_after_a_signal_no_further_batch_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exit_code: int
) -> None:
    sweep = FakeSweep(tmp_path, {0: State.PREEMPTED}, skip_invalid=False)
    sweep.exit_code = exit_code
    with pytest.raises(SystemExit) as caught:
        make_launcher(sweep, monkeypatch).launch([["seed=1"]], 0)
    assert caught.value.code == exit_code


def test_a_folder_is_named_by_its_number_or_as_subdir_defines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = FakeSweep(tmp_path, {}, skip_invalid=False)
    assert make_launcher(sweep, monkeypatch).get_folder_name(["seed=7"], 3) == "3"
    launcher = make_launcher(sweep, monkeypatch, subdir="seed_${seed}/${hydra.job.num}")
    assert launcher.get_folder_name(["seed=7"], 3) == "seed_7/3"
