"""Jobs as they are composed and found again, and what a sweep says that goes wrong without stopping its jobs."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from recipes.config import compose_and_check
from recipes.config.compose import CONF
from recipes.launcher.job import Job, State
from recipes.launcher.local import Local
from recipes.sweep.command_line import check_command, command_of, job_overrides, resume_command
from recipes.sweep.live_table import table_of
from recipes.sweep.pool import worst_exit_code
from recipes.sweep.report import Records
from recipes.sweep.settings import Settings
from recipes.sweep.sweep import Sweep


def settings_of(*, compare: Callable[..., None] | None = None, **changed: Any) -> Settings:
    words: dict[str, Any] = {"objective": "best_val_loss", "direction": "minimize"}
    words |= {"retry_failed": False, "skip_invalid": False, "dashboard": []}
    return Settings(**words | changed, compare=compare)


def sweep_in(folder: Path, **changed: Any) -> Sweep:
    return Sweep(
        folder=folder,
        place=Local(devices_per_job=None, max_jobs=None),
        settings=settings_of(**changed),
        config_folder=CONF,
        config_name="config",
        keys=[],
        typed=["-m", "seed=1,2"],
    )


def _composed(compose: Callable[..., Any], *words: Any, **where: Any) -> tuple[Any, list[Any]]:
    return compose(*words, **where)[0], []


def prepared(sweep: Sweep, *words: str, number: int = 0) -> Job:
    job, mistakes = sweep.prepare(list(words), number, lambda _, n=number: str(n))
    assert not mistakes, list(map(str, mistakes))
    return job


def test_what_an_entry_of_conf_sweep_sets_beside_the_space_reaches_its_jobs(tmp_path: Path) -> None:
    words = ["sweep=lr_and_batch", "sweep.samples=480", "optimizer.lr=1e-3", "global_batch_size=8"]
    job = prepared(sweep_in(tmp_path), *words, "launcher.max_jobs=2", "hydra.sweep.dir=x")
    assert job.composed is not None
    config = job.composed.config
    assert config["trainer"]["max_steps"] == 60
    assert (config["warmup_steps"], config["eval_every"], config["save_every"]) == (6, 10, 10)
    assert job.overrides == words
    assert command_of(job.overrides).endswith("global_batch_size=8 hydra.mode=RUN")


def test_a_job_is_the_same_whoever_carries_it_out_and_whatever_it_is_judged_by() -> None:
    words = ["seed=1", "sweep=lr", "sweep.samples=10"]
    others = ["launcher=slurm", "launcher.max_jobs=3", "sweep.objective=mfu", "hydra.sweep.dir=x"]
    others += ["sweep.retry_failed=true", "ignore_slurm=true", "hydra/sweeper=optuna"]
    assert job_overrides([*words, *others]) == words
    assert job_overrides(["~callbacks.report=null", "seed=1"]) == [
        "~callbacks.report",
        "seed=1",
    ]


def test_two_jobs_of_one_folder_are_refused(tmp_path: Path) -> None:
    sweep = sweep_in(tmp_path)
    prepared(sweep, "seed=1")
    _, [mistake] = sweep.prepare(["seed=2"], 1, lambda _: "0")
    assert mistake.reason == "jobs 0 and 1 would share it"


def test_a_job_that_is_over_is_not_checked_again_when_its_data_has_gone(tmp_path: Path) -> None:
    gone = ["data=text_files", f"data.path={tmp_path / 'gone'}"]
    job = Job(number=0, folder=tmp_path / "0", overrides=gone, state=State.FINISHED, exit_code=0)
    job.save()
    sweep = sweep_in(tmp_path)
    found, mistakes = sweep.prepare(gone, 0, str)
    assert (found.number, mistakes, sweep.is_to_start(found)) == (0, [], False)
    _, mistakes = sweep.prepare([*gone, "seed=2"], 1, str)
    assert mistakes, "a new one is checked"


def test_a_job_that_was_cut_goes_on_from_its_own_checkpoint_also_where_it_began_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"  # a run is of no matter here
    words = ["seed=3", f"resume={other}"]
    unchecked = partial(_composed, compose_and_check)
    monkeypatch.setattr("recipes.sweep.sweep.compose_and_check", unchecked)
    fresh, _ = sweep_in(tmp_path).prepare(words, 0, str)
    assert fresh.composed is not None
    assert fresh.composed.config["resume"] == str(other)
    monkeypatch.setattr("recipes.sweep.sweep.newest_checkpoint", lambda folder: folder / "a.ckpt")
    cut, _ = sweep_in(tmp_path).prepare(words, 0, str)
    assert cut.composed is not None
    assert cut.composed.config["resume"] == "auto"
    assert prepared(sweep_in(tmp_path), "seed=3").overrides == ["seed=3"]


def test_a_page_that_cannot_be_written_is_one_line_and_no_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def compare(*_: Any, **__: Any) -> None:
        raise LookupError("no run has best_val_loss")

    job = Job(
        number=0, folder=tmp_path / "0", overrides=["seed=1"], state=State.FINISHED, exit_code=0
    )
    job.save()
    (job.folder / "config.yaml").touch()
    (job.folder / "summary.json").write_text(json.dumps({"best_val_loss": 1.0}))
    records = Records(tmp_path, [job], settings=settings_of(compare=compare), keys=[], typed=[])
    (tmp_path / "sweep.csv.tmp").mkdir()  # what a disk that takes nothing says, to anybody
    with caplog.at_level("ERROR", logger="lightning_recipes"):
        for _ in range(2):
            records.write(with_page=True, now=True)
    assert caplog.text.count("report.html cannot be written now: LookupError: no run has") == 1
    assert caplog.text.count("sweep.csv cannot be written now: Is a directory") == 1


def test_no_page_is_asked_for_before_a_run_has_what_it_is_sorted_by(tmp_path: Path) -> None:
    asked: list[Any] = []
    job = Job(number=0, folder=tmp_path / "0", overrides=[], state=State.FAILED, exit_code=1)
    job.save()
    (job.folder / "config.yaml").touch()
    settings = settings_of(compare=lambda *words, **_: asked.append(words))
    Records(tmp_path, [job], settings=settings, keys=[], typed=[]).write(with_page=True, now=True)
    assert asked == []


def test_words_with_brackets_are_shown_as_they_were_typed(tmp_path: Path) -> None:
    job = Job(number=0, folder=tmp_path, overrides=["tags=[a]", "data.path=[/a/b]"])
    console = Console(width=80, record=True, file=(tmp_path / "shown").open("w"))
    console.print(table_of([job], {0: {"tags": "[a]", "data.path": "[/a/b]"}}, {}))
    shown = console.export_text()
    assert "[a]" in shown
    assert "[/a/b]" in shown


@pytest.mark.parametrize(
    ("states", "exit_code"),
    [
        ([State.PREEMPTED, State.FINISHED, State.WAITING], 75),
        ([State.PREEMPTED, State.PRUNED, State.FAILED], 75),
        ([State.PREEMPTED, State.KILLED], 143),
        ([State.INTERRUPTED], 143),
    ],
)
def test_a_stopped_sweep_is_75_where_nothing_that_ran_is_lost(
    tmp_path: Path, states: list[State], exit_code: int
) -> None:
    jobs = [Job(number=n, folder=tmp_path, overrides=[], state=s) for n, s in enumerate(states)]
    assert worst_exit_code(jobs) == exit_code


def test_the_command_that_goes_on_is_one_that_hydra_reads() -> None:
    typed = ["-m", "seed=1,2", "hydra.sweep.dir=old"]
    assert resume_command(typed, Path("a b, c")) == (
        "python train.py -m seed=1,2 'hydra.sweep.dir='\"'\"'a b, c'\"'\"''"
    )


@pytest.mark.parametrize(
    ("words", "for_hydra", "says"),
    [
        (["trainer.benchmark=true,false"], ["+trainer.benchmark=true,false"], ""),
        (["sweep=lr", "++optimizer.lr=1e-3"], ["sweep=lr", "optimizer.lr=1e-3"], ""),
        (["scheduler=glob(w*)"], ["scheduler=glob(w*)"], ""),
        (["seed=range(3,1)"], ["seed=range(3,1)"], "there is nothing in it"),
        (["optimizer.lr=interval(1,2)"], ["optimizer.lr=interval(1,2)"], "hydra/sweeper=optuna"),
        (["optimzer.lr=1,2"], ["optimzer.lr=1,2"], "optimizer.lr="),
        (["sweep=precision_by_strategy"], ["sweep=precision_by_strategy"], ""),
    ],
)
def test_the_words_of_a_sweep_are_checked_as_those_of_its_first_job(
    words: list[str], for_hydra: list[str], says: str
) -> None:
    checked = check_command(words, config_folder=CONF, config_name="config")
    assert checked.for_hydra == for_hydra
    told = " ".join(map(str, checked.mistakes))
    assert says in told
    assert bool(told) == bool(says)
