"""A study in a sweep's folder: the same trials whether it is killed or not, and what each end tells the study."""

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from recipes.config.compose import CONF
from recipes.errors import ConfigError
from recipes.launcher.job import Job, State
from recipes.launcher.local import Local
from recipes.sweep.optuna_study import StudySource
from recipes.sweep.optuna_sweeper import make_distributions, trial_overrides
from recipes.sweep.search_space import SearchSpace, read_space
from recipes.sweep.settings import Settings
from recipes.sweep.sweep import Sweep

SPACE = (
    "optimizer.lr=tag(log,interval(1e-4,1e-1))",
    "global_batch_size=8,16,32",
    "warmup_steps=range(1,9,2)",
)


def space_of(words: tuple[str, ...] = SPACE) -> SearchSpace:
    space, mistakes = read_space(words)
    assert not mistakes
    return space


def source_in(
    folder: Path, *, num_trials: int = 12, retry_failed: bool = False, prune_on: str | None = None
) -> StudySource:
    folder.mkdir(exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    settings = Settings(
        objective="best_val_loss",
        direction="minimize",
        retry_failed=retry_failed,
        skip_invalid=False,
        compare=None,
        dashboard=[],
    )
    sweep = Sweep(
        folder=folder,
        place=Local(devices_per_job=None, max_jobs=None),
        settings=settings,
        config_folder=CONF,
        config_name="config",
        keys=[],
        typed=[],
    )
    study = optuna.create_study(
        storage=f"sqlite:///{folder / 'study.db'}",
        study_name="sweep",
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
    )
    space = space_of()
    return StudySource(
        study=study,
        sweep=sweep,
        distributions=make_distributions(space),
        words_of=partial(trial_overrides, space),
        name_of=lambda _, number: str(number),
        num_trials=num_trials,
        seed_sampler=lambda trial: optuna.samplers.TPESampler(seed=trial, n_startup_trials=3),
        prune_on=prune_on,
    )


def loss_of(job: Job) -> float:
    """The bottom of a bowl at lr=3e-3."""
    typed = dict(word.split("=") for word in job.overrides)
    return math.log(float(typed["optimizer.lr"]) / 3e-3) ** 2 + float(typed["warmup_steps"]) / 100


def end(source: StudySource, job: Job, state: State, **summary: Any) -> None:
    job.save()
    (job.folder / "summary.json").write_text(json.dumps(summary))
    job.state, job.exit_code = state, 0 if state is State.FINISHED else 1
    job.save()
    source.ended(job)


def drive(source: StudySource, *, kill_at: int | None = None) -> list[Job]:
    """Carry out the trials; `kill_at`: the job of this number is left as a kill leaves it."""
    jobs = []
    while more := source.more():
        [job] = more
        jobs.append(job)
        job.state = State.RUNNING
        job.save()
        if job.number == kill_at:
            return jobs
        end(source, job, State.FINISHED, best_val_loss=loss_of(job))
    return jobs


def trials_of(folder: Path) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(storage=f"sqlite:///{folder / 'study.db'}", study_name="sweep").trials


def test_a_study_killed_in_its_sixth_trial_goes_on_to_the_twelve_of_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    drive(source_in(tmp_path / "whole"))
    cut = tmp_path / "cut"
    before = drive(source_in(cut), kill_at=5)
    after = drive(source_in(cut))
    assert [job.number for job in before] == [0, 1, 2, 3, 4, 5]
    assert [job.number for job in after] == [5, 6, 7, 8, 9, 10, 11], (
        "the sixth goes on in its folder"
    )
    whole, resumed = trials_of(tmp_path / "whole"), trials_of(cut)
    assert len(resumed) == 12
    assert [trial.params for trial in resumed] == [trial.params for trial in whole]
    assert [trial.value for trial in resumed] == [trial.value for trial in whole]
    assert {trial.state for trial in resumed} == {TrialState.COMPLETE}


def test_a_trial_that_ended_while_nobody_listened_is_told_and_not_run_again(tmp_path: Path) -> None:
    [*_, last] = drive(source_in(tmp_path), kill_at=1)
    (last.folder / "summary.json").write_text(json.dumps({"best_val_loss": 0.5}))
    last.state, last.exit_code = State.FINISHED, 0
    last.save()
    [job] = source_in(tmp_path).more()
    assert job.number == 2
    assert trials_of(tmp_path)[1].value == 0.5


def test_a_study_killed_before_a_trial_knew_its_parameters_gives_it_the_rest(
    tmp_path: Path,
) -> None:
    source = source_in(tmp_path)
    source._study.ask()  # a trial without parameters: what a kill between two writes leaves
    [job] = source_in(tmp_path).more()
    assert job.number == 0
    assert set(trials_of(tmp_path)[0].params) == {
        "optimizer.lr",
        "global_batch_size",
        "warmup_steps",
    }


def test_what_has_failed_is_told_as_failed_and_repeated_with_the_same_words_when_asked(
    tmp_path: Path,
) -> None:
    source = source_in(tmp_path, num_trials=2)
    [first] = source.more()
    end(source, first, State.FAILED)
    [second] = source.more()
    end(source, second, State.FINISHED, best_val_loss=1.0)
    assert source.more() == []
    assert source_in(tmp_path, num_trials=2).more() == [], "left alone"
    again = source_in(tmp_path, num_trials=2, retry_failed=True)
    [repeated] = again.more()
    assert sorted(repeated.overrides) == sorted(first.overrides)
    end(again, repeated, State.FINISHED, best_val_loss=2.0)
    assert again.more() == []
    states = [trial.state for trial in trials_of(tmp_path)]
    assert states == [TrialState.FAIL, TrialState.COMPLETE, TrialState.COMPLETE]


@pytest.mark.parametrize("summary", [{"best_val_loss": None}, {"best_val_loss": math.nan}])
def test_a_run_without_a_finite_objective_is_a_failed_trial(
    tmp_path: Path, summary: Mapping[str, Any]
) -> None:
    source = source_in(tmp_path)
    [job] = source.more()
    end(source, job, State.FINISHED, **summary)
    assert trials_of(tmp_path)[0].state is TrialState.FAIL


def test_a_trial_worse_than_the_median_at_its_step_is_hopeless_and_one_that_is_better_is_not(
    tmp_path: Path,
) -> None:
    source = source_in(tmp_path, prune_on="val/loss")
    for _ in range(3):
        [job] = source.more()
        rows = [{"step": step, "val/loss": 4.0 - step / 100} for step in (10.0, 20.0)]
        assert not source.should_prune(job, rows)
        end(source, job, State.FINISHED, best_val_loss=3.8)
    [better] = source.more()
    assert not source.should_prune(better, [{"step": 10.0, "val/loss": 3.0}])
    assert not source.should_prune(better, [{"step": 15.0, "train/loss": 9.0}]), "another metric"
    end(source, better, State.FINISHED, best_val_loss=2.8)
    [worse] = source.more()
    assert source.should_prune(worse, [{"step": 10.0, "val/loss": 5.0}])
    end(source, worse, State.PRUNED)
    assert trials_of(tmp_path)[4].state is TrialState.PRUNED
    assert trials_of(tmp_path)[4].intermediate_values == {10: 5.0}


def test_a_trial_with_a_wrong_config_is_refused_and_the_next_one_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_in(tmp_path, num_trials=3)
    space = space_of()

    def words_of(params: Mapping[str, Any]) -> list[str]:
        return [*trial_overrides(space, params), *(["trainer.max_steps=-5"] if not asked else [])]

    asked: list[int] = []
    monkeypatch.setattr(source, "_words_of", lambda params: (words_of(params), asked.append(1))[0])
    [job] = source.more()
    assert job.number == 1
    assert trials_of(tmp_path)[0].state is TrialState.FAIL


def test_a_study_goes_on_as_what_it_was_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source_in(tmp_path)
    monkeypatch.setitem(globals(), "space_of", lambda: read_space(SPACE[:2])[0])
    with pytest.raises(ConfigError, match="the space of the study in it is"):
        source_in(tmp_path)


def test_a_study_that_maximizes_stops_the_trial_with_the_larger_loss(tmp_path: Path) -> None:
    source = source_in(tmp_path, prune_on="val/loss")
    source._prune_sign = -1
    pruner_of_a_maximum = optuna.create_study(
        direction="maximize", pruner=optuna.pruners.MedianPruner(n_startup_trials=2)
    )
    source._study = pruner_of_a_maximum
    for _ in range(3):
        [job] = source.more()
        assert not source.should_prune(job, [{"step": 10.0, "val/loss": 4.0}])
        end(source, job, State.FINISHED, best_val_loss=100.0)
    [job] = source.more()
    assert not source.should_prune(job, [{"step": 10.0, "val/loss": 3.0}])
    end(source, job, State.FINISHED, best_val_loss=100.0)
    [job] = source.more()
    assert source.should_prune(job, [{"step": 10.0, "val/loss": 5.0}])
