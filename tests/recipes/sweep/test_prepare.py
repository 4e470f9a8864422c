"""Jobs as they are composed and found again, the printed commands, and errors that must not stop a sweep."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from recipes.config import compose_and_check
from recipes.config.compose import CONF
from recipes.errors import ConfigError
from recipes.launcher.job import Job, State, read_job
from recipes.launcher.local import Local
from recipes.sweep.command_line import check_command, job_overrides, resume_command, train_command
from recipes.sweep.live_table import make_table
from recipes.sweep.pool import worst_exit_code
from recipes.sweep.report import Report
from recipes.sweep.settings import Settings
from recipes.sweep.sweep import Sweep


def make_settings(*, compare: Callable[..., None] | None = None, **changed: Any) -> Settings:
    defaults: dict[str, Any] = {"objective": "best_val_loss", "direction": "minimize"}
    defaults |= {"retry_failed": False, "skip_invalid": False, "dashboard": []}
    return Settings(**defaults | changed, compare=compare)


def make_sweep(folder: Path, **changed: Any) -> Sweep:
    return Sweep(
        folder=folder,
        launcher=Local(devices_per_job=None, max_jobs=None),
        settings=make_settings(**changed),
        config_folder=CONF,
        config_name="config",
        keys=[],
        typed=["-m", "seed=1,2"],
    )


def compose_unchecked(overrides: Any, **source: Any) -> tuple[Any, list[Any]]:
    return compose_and_check(overrides, **source)[0], []


def prepare_job(sweep: Sweep, *overrides: str, number: int = 0) -> Job:
    job, mistakes = sweep.prepare(list(overrides), number, lambda _, n=number: str(n))
    assert not mistakes, list(map(str, mistakes))
    return job


def test_settings_of_a_conf_sweep_option_other_than_the_space_reach_its_jobs(
    tmp_path: Path,
) -> None:
    overrides = [
        "sweep=lr_and_batch",
        "sweep.samples=480",
        "optimizer.lr=1e-3",
        "global_batch_size=8",
    ]
    job = prepare_job(make_sweep(tmp_path), *overrides, "launcher.max_jobs=2", "hydra.sweep.dir=x")
    assert job.composed is not None
    config = job.composed.config
    assert config["trainer"]["max_steps"] == 60
    assert (config["warmup_steps"], config["eval_every"], config["save_every"]) == (6, 10, 10)
    assert job.overrides == overrides
    assert train_command(job.overrides).endswith("global_batch_size=8 hydra.mode=RUN")


def test_a_job_is_identified_without_its_launcher_objective_or_folder() -> None:
    own = ["seed=1", "sweep=lr", "sweep.samples=10"]
    others = ["launcher=slurm", "launcher.max_jobs=3", "sweep.objective=mfu", "hydra.sweep.dir=x"]
    others += ["sweep.retry_failed=true", "ignore_slurm=true", "hydra/sweeper=optuna"]
    assert job_overrides([*own, *others]) == own
    assert job_overrides(["~callbacks.report=null", "seed=1"]) == [
        "~callbacks.report",
        "seed=1",
    ]


def test_two_jobs_with_the_same_folder_are_rejected(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path)
    prepare_job(sweep, "seed=1")
    first = sweep.jobs[0]
    first.save()
    rejected, [mistake] = sweep.prepare(["seed=2"], 1, lambda _: "0")
    assert mistake.reason == "jobs 0 and 1 would share this folder"
    sweep.reject(rejected, [mistake])  # as with sweep.skip_invalid=true
    assert read_job(first.file) == first, "the job that has the folder keeps its file"


@pytest.mark.parametrize("name", ["/abs", "../x", "a/../../x", "", ".", "a/b/c"])
def test_a_job_stays_in_the_folder_of_its_sweep(name: str, tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path / "sweep")
    with pytest.raises(ConfigError, match=r"hydra\.sweep\.subdir=") as caught:
        sweep.prepare(["seed=1"], 0, lambda _: name)
    assert caught.value.setting == f"hydra.sweep.subdir={name}"
    assert (sweep.jobs, list(tmp_path.glob("**/job.json"))) == ([], [])


def put_run(folder: Path) -> Path:
    """Make what a single run that was started leaves in its folder."""
    folder.mkdir()
    (folder / "train.log").touch()
    (folder / ".lock").write_text("process 1 on here\n")
    return folder


def test_a_new_job_does_not_continue_a_single_run_in_the_folder_of_the_sweep(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path)
    put_run(tmp_path / "0")
    put_run(tmp_path / "2")
    jobs = [sweep.prepare([f"seed={number}"], number, str)[0] for number in range(2)]
    assert [(job.number, job.folder.name) for job in jobs] == [(1, "1"), (3, "3")]
    put_run(tmp_path / "named")
    _, [mistake] = sweep.prepare(["seed=5"], 5, lambda _: "named")
    assert mistake.reason.startswith(f"{tmp_path / 'named'} is of a run that no job of this sweep started")


@pytest.mark.parametrize("name", ["report.html", "sweep.csv", "multirun.yaml"])
def test_a_sweep_replaces_no_file_of_others(name: str, tmp_path: Path) -> None:
    where = {"config_folder": CONF, "config_name": "config"}
    command = ["seed=1,2", f"hydra.sweep.dir={tmp_path}"]
    (tmp_path / name).write_text("mine")
    [mistake] = check_command(command, **where).mistakes
    assert mistake.reason == f"it holds {name}, which is of no sweep, and which this one would replace"
    Job(number=0, folder=tmp_path / "0", overrides=["seed=1"]).save()
    assert check_command(command, **where).mistakes == [], "an earlier sweep's"
    [mistake] = check_command(["seed=1,2", f"hydra.sweep.dir={put_run(tmp_path / 'run')}"], **where).mistakes
    assert mistake.reason == "it is the folder of a run, whose report this sweep would replace"


@pytest.mark.parametrize("direction", ["max", "min", "higher", "maximise", "1"])
def test_a_direction_that_is_none_is_rejected_and_not_minimized(direction: str) -> None:
    _, mistakes = compose_and_check([f"sweep.direction={direction}"])
    reasons = [mistake.reason for mistake in mistakes if mistake.setting == f"sweep.direction={direction}"]
    assert reasons == ["it takes minimize or maximize"]


def test_a_finished_job_is_not_checked_again_when_its_data_is_gone(tmp_path: Path) -> None:
    gone = ["data=text_files", f"data.path={tmp_path / 'gone'}"]
    job = Job(number=0, folder=tmp_path / "0", overrides=gone, state=State.FINISHED, exit_code=0)
    job.save()
    sweep = make_sweep(tmp_path)
    found, mistakes = sweep.prepare(gone, 0, str)
    assert (found.number, mistakes, sweep.should_start(found)) == (0, [], False)
    _, mistakes = sweep.prepare([*gone, "seed=2"], 1, str)
    assert mistakes, "a new job is checked"


def test_an_interrupted_job_resumes_from_its_own_checkpoint_even_if_it_started_from_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"  # the run need not exist
    overrides = ["seed=3", f"resume={other}"]
    monkeypatch.setattr("recipes.launcher.composed_job.compose_and_check", compose_unchecked)
    new_job, _ = make_sweep(tmp_path).prepare(overrides, 0, str)
    assert new_job.composed is not None
    assert new_job.composed.config["resume"] == str(other)
    monkeypatch.setattr("recipes.sweep.sweep.newest_checkpoint", lambda folder: folder / "a.ckpt")
    interrupted, _ = make_sweep(tmp_path).prepare(overrides, 0, str)
    assert interrupted.composed is not None
    assert interrupted.composed.config["resume"] == "auto"
    assert prepare_job(make_sweep(tmp_path), "seed=3").overrides == ["seed=3"]


def test_files_that_cannot_be_written_are_one_log_line_each_and_no_exception(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def compare(*_: Any, **__: Any) -> None:
        raise LookupError("no run has best_val_loss")

    job = Job(number=0, folder=tmp_path / "0", overrides=["seed=1"], state=State.FINISHED, exit_code=0)
    job.save()
    (job.folder / "config.yaml").touch()
    (job.folder / "summary.json").write_text(json.dumps({"best_val_loss": 1.0}))
    report = Report(tmp_path, [job], settings=make_settings(compare=compare), keys=[], typed=[])
    (tmp_path / ".sweep.csv.tmp").mkdir()  # the temporary file cannot be opened, even by root
    with caplog.at_level("ERROR", logger="lightning_recipes"):
        for _ in range(2):
            report.write(with_page=True, now=True)
    assert caplog.text.count("Cannot write report.html: LookupError: no run has") == 1
    assert caplog.text.count("sweep.csv could not be written: Is a directory. The run goes on") == 1


def test_the_last_line_of_a_job_without_a_result_is_repeated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(number=0, folder=tmp_path / "0", overrides=[], state=State.FINISHED, exit_code=0)
    job.save()
    (log := tmp_path / "job.log").write_text("data: …\nNothing to do: it is at step 3, past trainer.max_steps=1\n")
    with caplog.at_level("INFO", logger="lightning_recipes"):
        Report(tmp_path, [job], settings=make_settings(compare=None), keys=[], typed=[]).log_job(job, log)
    assert f"  Nothing to do: it is at step 3, past trainer.max_steps=1\n  full log: {log}" in caplog.text
    assert "data: …" not in caplog.text


def test_no_page_is_written_before_a_run_has_the_objective(tmp_path: Path) -> None:
    pages: list[Any] = []
    job = Job(number=0, folder=tmp_path / "0", overrides=[], state=State.FAILED, exit_code=1)
    job.save()
    (job.folder / "config.yaml").touch()
    settings = make_settings(compare=lambda *args, **_: pages.append(args))
    Report(tmp_path, [job], settings=settings, keys=[], typed=[]).write(with_page=True, now=True)
    assert pages == []


def test_values_with_brackets_are_shown_as_typed_in_the_table(tmp_path: Path) -> None:
    job = Job(number=0, folder=tmp_path, overrides=["tags=[a]", "data.path=[/a/b]"])
    console = Console(width=80, record=True, file=(tmp_path / "shown").open("w"))
    console.print(make_table([job], {0: {"tags": "[a]", "data.path": "[/a/b]"}}, {}))
    shown = console.export_text()
    assert "[a]" in shown
    assert "[/a/b]" in shown


@pytest.mark.parametrize(
    ("states", "number", "exit_code"),
    [
        ([State.PREEMPTED, State.FINISHED, State.WAITING], signal.SIGINT, 75),
        ([State.PREEMPTED, State.PRUNED, State.FAILED], signal.SIGTERM, 75),
        ([State.PREEMPTED, State.KILLED], signal.SIGTERM, 143),
        ([State.INTERRUPTED], signal.SIGINT, 130),
    ],
)
def test_a_stopped_sweep_exits_with_75_only_if_no_job_lost_progress(
    tmp_path: Path, states: list[State], number: int, exit_code: int
) -> None:
    jobs = [Job(number=n, folder=tmp_path, overrides=[], state=s) for n, s in enumerate(states)]
    assert worst_exit_code(jobs, number) == exit_code


def test_the_resume_command_is_valid_for_a_shell_and_hydra() -> None:
    typed = ["-m", "seed=1,2", "hydra.sweep.dir=old"]
    assert resume_command(typed, Path("a b, c")) == (
        "python train.py -m seed=1,2 'hydra.sweep.dir='\"'\"'a b, c'\"'\"''"
    )


@pytest.mark.parametrize(
    ("typed", "for_hydra", "error"),
    [
        (["trainer.detect_anomaly=true,false"], ["++trainer.detect_anomaly=true,false"], ""),
        (
            ["sweep=lr", "++optimizer.lr=1e-3"],
            ["sweep=lr", "optimizer.lr=1e-3"],
            "replaces all those that the sweep tries",
        ),
        (["scheduler=glob(w*)"], ["scheduler=glob(w*)"], ""),
        (["seed=range(3,1)"], ["seed=range(3,1)"], "the sweep has no values"),
        (["optimizer.lr=interval(1,2)"], ["optimizer.lr=interval(1,2)"], "hydra/sweeper=optuna"),
        (["optimzer.lr=1,2"], ["optimzer.lr=1,2"], "optimizer.lr="),
        (["sweep=precision_by_strategy"], ["sweep=precision_by_strategy"], ""),
    ],
)
def test_the_overrides_of_a_sweep_are_checked_as_those_of_its_first_job(
    typed: list[str], for_hydra: list[str], error: str
) -> None:
    checked = check_command(typed, config_folder=CONF, config_name="config")
    assert checked.for_hydra == for_hydra
    report = " ".join(map(str, checked.mistakes))
    assert error in report
    assert bool(report) == bool(error)
