"""A study in a sweep's folder: the same trials whether it is killed or not, and the result of each way a job ends."""

import json
import logging
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
from recipes.sweep import optuna_study
from recipes.sweep.optuna_study import StudySource, count_combinations
from recipes.sweep.optuna_sweeper import make_distributions, trial_overrides
from recipes.sweep.pool import Pool
from recipes.sweep.search_space import SearchSpace, read_space
from recipes.sweep.settings import Settings
from recipes.sweep.sweep import Sweep

SPACE = (
    "optimizer.lr=tag(log,interval(1e-4,1e-1))",
    "global_batch_size=8,16,32",
    "warmup_steps=range(1,9,2)",
)


def make_space(overrides: tuple[str, ...] = SPACE) -> SearchSpace:
    space, mistakes = read_space(overrides)
    assert not mistakes
    return space


def open_source(
    folder: Path,
    *,
    num_trials: int = 12,
    retry_failed: bool = False,
    prune_on: str | None = None,
    direction: Any = "minimize",
    space: tuple[str, ...] | None = None,
) -> StudySource:
    folder.mkdir(exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    settings = Settings(
        objective="best_val_loss",
        direction=direction,
        retry_failed=retry_failed,
        skip_invalid=False,
        compare=None,
        dashboard=[],
    )
    sweep = Sweep(
        folder=folder,
        launcher=Local(devices_per_job=None, max_jobs=None),
        settings=settings,
        config_folder=CONF,
        config_name="config",
        keys=[],
        typed=[],
    )
    study = optuna.create_study(
        storage=f"sqlite:///{folder / 'study.db'}",
        study_name="sweep",
        direction=direction,
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
    )
    searched = make_space() if space is None else make_space(space)
    return StudySource(
        study=study,
        sweep=sweep,
        distributions=make_distributions(searched),
        make_overrides=partial(trial_overrides, searched),
        get_folder_name=lambda _, number: str(number),
        num_trials=num_trials,
        make_sampler=lambda trial: optuna.samplers.TPESampler(seed=trial, n_startup_trials=3),
        prune_on=prune_on,
    )


def bowl_loss(job: Job) -> float:
    """Return a loss with its minimum at lr=3e-3."""
    values = dict(override.split("=") for override in job.overrides)
    return math.log(float(values["optimizer.lr"]) / 3e-3) ** 2 + float(values["warmup_steps"]) / 100


def end(source: StudySource, job: Job, state: State, **summary: Any) -> None:
    job.save()
    (job.folder / "summary.json").write_text(json.dumps(summary))
    job.state, job.exit_code = state, 0 if state is State.FINISHED else 1
    job.save()
    source.job_ended(job)


def drive(source: StudySource, *, kill_at: int | None = None) -> list[Job]:
    """Run the trials; `kill_at`: stop and leave the job with this number as a kill would."""
    jobs = []
    while batch := source.next_jobs():
        [job] = batch
        jobs.append(job)
        job.state = State.RUNNING
        job.save()
        if job.number == kill_at:
            return jobs
        end(source, job, State.FINISHED, best_val_loss=bowl_loss(job))
    return jobs


def load_trials(folder: Path) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(storage=f"sqlite:///{folder / 'study.db'}", study_name="sweep").trials


def test_a_study_killed_in_its_sixth_trial_resumes_to_the_twelve_trials_of_an_uninterrupted_one(
    tmp_path: Path,
) -> None:
    drive(open_source(tmp_path / "reference"))
    killed = tmp_path / "killed"
    before = drive(open_source(killed), kill_at=5)
    after = drive(open_source(killed))
    assert [job.number for job in before] == [0, 1, 2, 3, 4, 5]
    assert [job.number for job in after] == [5, 6, 7, 8, 9, 10, 11], "the sixth trial resumes in its folder"
    reference, resumed = load_trials(tmp_path / "reference"), load_trials(killed)
    assert len(resumed) == 12
    assert [trial.params for trial in resumed] == [trial.params for trial in reference]
    assert [trial.value for trial in resumed] == [trial.value for trial in reference]
    assert {trial.state for trial in resumed} == {TrialState.COMPLETE}


def test_a_trial_that_finished_after_the_sweep_was_killed_is_recorded_and_not_run_again(
    tmp_path: Path,
) -> None:
    [*_, last] = drive(open_source(tmp_path), kill_at=1)
    (last.folder / "summary.json").write_text(json.dumps({"best_val_loss": 0.5}))
    last.state, last.exit_code = State.FINISHED, 0
    last.save()
    [job] = open_source(tmp_path).next_jobs()
    assert job.number == 2
    assert load_trials(tmp_path)[1].value == 0.5


def test_a_trial_whose_parameters_were_not_stored_before_a_kill_gets_them_on_resume(
    tmp_path: Path,
) -> None:
    source = open_source(tmp_path)
    source._study.ask()  # without parameters, as after a kill between two writes
    [job] = open_source(tmp_path).next_jobs()
    assert job.number == 0
    assert set(load_trials(tmp_path)[0].params) == {
        "optimizer.lr",
        "global_batch_size",
        "warmup_steps",
    }


def test_a_failed_trial_is_retried_with_the_same_overrides_only_with_retry_failed(
    tmp_path: Path,
) -> None:
    source = open_source(tmp_path, num_trials=2)
    [first] = source.next_jobs()
    end(source, first, State.FAILED)
    [second] = source.next_jobs()
    end(source, second, State.FINISHED, best_val_loss=1.0)
    assert source.next_jobs() == []
    assert open_source(tmp_path, num_trials=2).next_jobs() == [], "not retried"
    again = open_source(tmp_path, num_trials=2, retry_failed=True)
    [retried] = again.next_jobs()
    assert sorted(retried.overrides) == sorted(first.overrides)
    end(again, retried, State.FINISHED, best_val_loss=2.0)
    assert again.next_jobs() == []
    states = [trial.state for trial in load_trials(tmp_path)]
    assert states == [TrialState.FAIL, TrialState.COMPLETE, TrialState.COMPLETE]


def test_a_run_without_the_objective_is_a_failed_trial(tmp_path: Path) -> None:
    source = open_source(tmp_path)
    [job] = source.next_jobs()
    end(source, job, State.FINISHED, best_val_loss=None)
    assert load_trials(tmp_path)[0].state is TrialState.FAIL


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_a_run_that_diverged_or_ran_out_of_memory_has_the_worst_value_and_one_that_crashed_has_none(
    tmp_path: Path, direction: str
) -> None:
    source = open_source(tmp_path, direction=direction)
    for state, summary in (
        (State.DIVERGED, {"best_val_loss": 2.5}),  # of a validation before it diverged
        (State.OUT_OF_MEMORY, {}),
        (State.FINISHED, {"best_val_loss": math.nan}),
        (State.FINISHED, {"best_val_loss": None}),  # as summary.json has it if each validation loss was NaN
        (State.FAILED, {"best_val_loss": 2.5}),
    ):
        [job] = source.next_jobs()
        job.save()
        if summary == {"best_val_loss": None}:
            (job.folder / "metrics.csv").write_text("step,val/loss\n10,nan\n")
        end(source, job, state, **summary)
    worst = math.inf if direction == "minimize" else -math.inf
    trials = load_trials(tmp_path)
    assert [trial.value for trial in trials] == [worst, worst, worst, worst, None]
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 4 + ["FAIL"]


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["minimize", "maximize"])
@pytest.mark.parametrize("sampler", [optuna.samplers.TPESampler, optuna.samplers.GPSampler])
@pytest.mark.filterwarnings("ignore:.*(experimental|Clip non-finite)")
def test_a_sampler_learns_where_runs_diverge_and_not_where_they_crash(
    tmp_path: Path, sampler: Any, direction: str
) -> None:
    num_bad = {}
    for state in (State.DIVERGED, State.FAILED):
        space = ("optimizer.lr=tag(log,interval(1e-4,1e2))",)  # 62 % of it diverges
        source = open_source(tmp_path / state, num_trials=24, direction=direction, space=space)
        source._make_sampler = lambda trial: sampler(seed=1000 + trial, n_startup_trials=5)
        num_bad[state] = 0
        while batch := source.next_jobs():
            [job] = batch
            [lr] = [float(text.partition("=")[2]) for text in job.overrides]
            num_bad[state] += lr > 0.02
            loss = (math.log10(lr) + 2.5) ** 2
            value = loss if direction == "minimize" else -loss
            end(source, job, state if lr > 0.02 else State.FINISHED, best_val_loss=value)
    # over six sequences of seeds, of 24 trials: 9.3 and 19.0 with TPE, 5.5 and 18.7 with GP
    assert num_bad[State.DIVERGED] <= num_bad[State.FAILED] - 6, num_bad


def test_a_repetition_gets_the_result_of_the_first_trial_and_the_study_ends_when_all_values_have_been_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="lightning_recipes")
    space = ("optimizer.lr=1e-3,1e-2,10",)
    source = open_source(tmp_path, num_trials=20, space=space)
    jobs = []
    while batch := source.next_jobs():
        [job] = batch
        jobs.append(job)
        lr = job.overrides[0]
        end(source, job, {"optimizer.lr=10": State.DIVERGED}.get(lr, State.FINISHED), best_val_loss=len(jobs))
    assert sorted(job.overrides for job in jobs) == [["optimizer.lr=0.001"], ["optimizer.lr=0.01"], ["optimizer.lr=10"]]
    line = "Every combination of the search space has been run (3): the study ends after 3 of 20 trials"
    assert [record.getMessage() for record in caplog.records if "Every combination" in record.getMessage()] == [line]
    by_params: dict[str, set[float | None]] = {}
    for trial in load_trials(tmp_path):
        by_params.setdefault(trial.params["optimizer.lr"], set()).add(trial.value)
    assert sorted(map(len, by_params.values())) == [1, 1, 1]
    assert by_params["10"] == {math.inf}
    assert open_source(tmp_path, num_trials=20, space=space).next_jobs() == [], "nor does a resumed study run more"
    # other fixed overrides make other runs
    [job] = open_source(tmp_path, num_trials=20, space=(*space, "trainer.max_steps=7")).next_jobs()
    assert job.number > 2


def test_a_repetition_of_a_running_trial_waits_for_its_result_also_over_a_kill(tmp_path: Path) -> None:
    source = open_source(tmp_path, num_trials=20, space=("optimizer.lr=1e-3,1e-2",))
    source._make_sampler = lambda trial: optuna.samplers.RandomSampler(seed=trial)
    [first] = source.next_jobs()
    [second] = source.next_jobs()
    assert first.overrides != second.overrides
    assert source.next_jobs() == [], "both are running"
    waiting = [trial.number for trial in load_trials(tmp_path) if "repeats" in trial.user_attrs]
    assert waiting, "seeds 0, 1, … propose one of the values twice first"
    for job in (first, second):
        job.state = State.RUNNING
        job.save()
    resumed = open_source(tmp_path, num_trials=20, space=("optimizer.lr=1e-3,1e-2",))
    jobs = [resumed.next_jobs()[0], resumed.next_jobs()[0]]
    assert [job.number for job in jobs] == [first.number, second.number]
    end(resumed, jobs[0], State.FINISHED, best_val_loss=1.0)
    end(resumed, jobs[1], State.FINISHED, best_val_loss=2.0)
    assert resumed.next_jobs() == []
    value = {str(job.overrides): loss for job, loss in zip(jobs, (1.0, 2.0), strict=True)}
    for trial in load_trials(tmp_path):
        assert trial.value == value[str(trial.user_attrs["overrides"])], trial.number


def test_a_diverged_trial_is_retried_only_with_retry_failed(tmp_path: Path) -> None:
    space = ("optimizer.lr=1e-3,10",)
    source = open_source(tmp_path, num_trials=2, space=space)
    while batch := source.next_jobs():
        is_bad = batch[0].overrides == ["optimizer.lr=10"]
        end(source, batch[0], State.OUT_OF_MEMORY if is_bad else State.FINISHED, best_val_loss=1.0)
    assert open_source(tmp_path, num_trials=2, space=space).next_jobs() == []
    again = open_source(tmp_path, num_trials=2, space=space, retry_failed=True)
    [job] = again.next_jobs()
    assert job.overrides == ["optimizer.lr=10"]
    end(again, job, State.FINISHED, best_val_loss=0.5)
    assert again.next_jobs() == []
    assert load_trials(tmp_path)[-1].value == 0.5


def test_a_sampler_that_only_repeats_itself_ends_the_study(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optuna_study, "_MAX_REPETITIONS", 3)
    caplog.set_level(logging.INFO, logger="lightning_recipes")
    source = open_source(tmp_path, num_trials=5, space=("warmup_steps=range(1,9)",))
    source._make_sampler = lambda _: optuna.samplers.RandomSampler(seed=1)
    [job] = source.next_jobs()
    end(source, job, State.FINISHED, best_val_loss=1.0)
    assert source.next_jobs() == []
    assert "The last 3 proposals were all repeats: the study ends after 1 of 5 trials" in caplog.text


@pytest.mark.parametrize(
    ("space", "size"),
    [
        (("optimizer.lr=1e-3,1e-2", "warmup_steps=range(1,9,2)"), 8),
        (("optimizer.lr=range(0.1,0.5,0.1)",), 4),
        (("warmup_steps=range(1,5)", "seed=1,2"), 8),
        (("optimizer.lr=interval(0.1,0.1)",), 1),
        (("optimizer.lr=interval(0.1,0.2)", "warmup_steps=1,2"), None),
    ],
)
def test_the_size_of_a_search_space_is_the_number_of_its_combinations(space: tuple[str, ...], size: int | None) -> None:
    assert count_combinations(make_distributions(make_space(space)).values()) == size


def test_a_trial_worse_than_the_median_at_its_step_is_pruned_and_a_better_one_is_not(
    tmp_path: Path,
) -> None:
    source = open_source(tmp_path, prune_on="val/loss")
    for _ in range(3):
        [job] = source.next_jobs()
        rows = [{"step": step, "val/loss": 4.0 - step / 100} for step in (10.0, 20.0)]
        assert not source.should_prune(job, rows)
        end(source, job, State.FINISHED, best_val_loss=3.8)
    [better] = source.next_jobs()
    assert not source.should_prune(better, [{"step": 10.0, "val/loss": 3.0}])
    assert not source.should_prune(better, [{"step": 15.0, "train/loss": 9.0}]), "another metric"
    end(source, better, State.FINISHED, best_val_loss=2.8)
    [worse] = source.next_jobs()
    assert source.should_prune(worse, [{"step": 10.0, "val/loss": 5.0}])
    end(source, worse, State.PRUNED)
    assert load_trials(tmp_path)[4].state is TrialState.PRUNED
    assert load_trials(tmp_path)[4].intermediate_values == {10: 5.0}


def test_a_trial_with_an_invalid_config_fails_and_the_next_one_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(tmp_path, num_trials=3)
    space = make_space()
    invalid = iter([["trainer.max_steps=-5"]])  # only in the first trial

    def make_overrides(params: Mapping[str, Any]) -> list[str]:
        return [*trial_overrides(space, params), *next(invalid, [])]

    monkeypatch.setattr(source, "_make_overrides", make_overrides)
    [job] = source.next_jobs()
    assert job.number == 1
    assert load_trials(tmp_path)[0].state is TrialState.FAIL


def test_a_trial_whose_job_cannot_be_saved_stays_open_and_ends_the_command(tmp_path: Path) -> None:
    source = open_source(tmp_path, num_trials=3)
    (tmp_path / "0").write_text("")  # no folder can be made here, as on a full disk
    launcher: Any = source._sweep.launcher
    Pool(launcher, source, on_change=lambda _: None, show=lambda _: None).run()
    assert [trial.state for trial in load_trials(tmp_path)] == [TrialState.RUNNING]
    (tmp_path / "0").unlink()
    [job, *_] = drive(open_source(tmp_path, num_trials=3))
    assert job.number == 0
    assert [trial.state for trial in load_trials(tmp_path)] == [TrialState.COMPLETE] * 3


def test_a_study_is_not_resumed_with_another_search_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_source(tmp_path)
    monkeypatch.setitem(globals(), "make_space", lambda: read_space(SPACE[:2])[0])
    with pytest.raises(ConfigError, match="the existing study uses space"):
        open_source(tmp_path)


def test_a_study_that_maximizes_prunes_the_trial_with_the_larger_loss(tmp_path: Path) -> None:
    source = open_source(tmp_path, prune_on="val/loss")
    source._prune_sign = -1
    maximizing_study = optuna.create_study(direction="maximize", pruner=optuna.pruners.MedianPruner(n_startup_trials=2))
    source._study = maximizing_study
    for _ in range(3):
        [job] = source.next_jobs()
        assert not source.should_prune(job, [{"step": 10.0, "val/loss": 4.0}])
        end(source, job, State.FINISHED, best_val_loss=100.0)
    [job] = source.next_jobs()
    assert not source.should_prune(job, [{"step": 10.0, "val/loss": 3.0}])
    end(source, job, State.FINISHED, best_val_loss=100.0)
    [job] = source.next_jobs()
    assert source.should_prune(job, [{"step": 10.0, "val/loss": 5.0}])
