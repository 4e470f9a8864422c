"""Mistakes of a sweep itself, found before Hydra builds its sweeper, composes jobs or creates a folder."""

import shlex
import time
from pathlib import Path

import pytest

from recipes.config.cached_compose import compose_overrides
from recipes.config.compose import CONF
from recipes.sweep.command_line import SweepCommand, check_command
from recipes.sweep.main import reject_settings_of_sweep

OPTUNA = "hydra/sweeper=optuna optimizer.lr=interval(1e-4,1e-2)"
# command line -> the settings that are named
WRONG = {
    "seed=range(0,nan)": ["seed=range(0,nan)"],
    "seed=range(1,5,0)": ["seed=range(1,5,0)"],
    "seed=range(3,1)": ["seed=range(3,1)"],
    "seed=range(1,5002)": ["seed=range(1,5002)"],
    "seed=range(1,100000000001)": ["seed=range(1,100000000001)"],
    "seed=range(1,101) optimizer.lr=range(1,101)": ["seed=range(1,101) optimizer.lr=range(1,101)"],
    "sweep=lr seed=range(1,1002)": ["seed=range(1,1002)"],
    "seed=1,2 hydra.run.dir=a,b": ["hydra.run.dir=a,b"],
    "seed=1,2 hydra.run.dir=a": ["hydra.run.dir=a"],
    "seed=1,2 hydra.sweep.dir= hydra.sweeper.max_batch_size=0": ["hydra.sweeper.max_batch_size=0", "hydra.sweep.dir="],
    "seed=1,2 hydra.sweep.dir=~nouser/x": ["hydra.sweep.dir=~nouser/x"],
    f"seed=1,2 hydra.sweep.dir={'x' * 300}": ["hydra.sweep.dir=…"],
    "seed=1,2 sweep.objective=val/nope": ["sweep.objective=val/nope"],
    "hydra.sweeper.params={seed:3}": ["hydra.sweeper.params={seed:3}"],
    "+hydra.sweeper.params.seed=3": ["+hydra.sweeper.params.seed=3"],
    f"{OPTUNA} hydra.sweeper.sampler=null hydra.sweeper.pruner=nope hydra.sweeper.seed=abc hydra.sweeper.n_trials=2.5"
    " hydra.sweeper.prune_direction=up": [
        "hydra.sweeper.sampler=null",
        "hydra.sweeper.pruner=nope",
        "hydra.sweeper.seed=abc",
        "hydra.sweeper.n_trials=2.5",
        "hydra.sweeper.prune_direction=up",
    ],
    f"{OPTUNA} hydra.sweeper.seed=-1 hydra.sweeper.n_trials=0 +hydra.sweeper.sampler.n_ei_candidates=-3"
    " hydra.sweeper.pruner.n_startup_trials=-1": [
        "hydra.sweeper.pruner.n_startup_trials=-1",
        "hydra.sweeper.sampler.n_ei_candidates=-3",
        "hydra.sweeper.n_trials=0",
        "hydra.sweeper.seed=-1",
    ],
    f"{OPTUNA} hydra.sweeper.pruner._target_=optuna.pruners.MedianPrunr": [
        "hydra.sweeper.pruner._target_=optuna.pruners.MedianPrunr"
    ],
    f"{OPTUNA} hydra.sweeper.prune_on=": ["hydra.sweeper.prune_on="],
    "seed=1,2 hydra.sweep.dir=gs://bucket/x": ["hydra.sweep.dir=gs://bucket/x"],
    "mode=wandb_sweep seed=1,2": ["-m mode=wandb_sweep"],
    # a job that is skipped does not excuse what every job has
    "model.num_heads=5,2 sweep.skip_invalid=True launcher.max_jobs=0": ["launcher.max_jobs=0"],
    "hydra/sweeper=optuna optimizer.lr=tag(log,interval(0,1))": ["optimizer.lr=tag(log,interval(0,1))"],
}


def check(typed: str) -> SweepCommand:
    return check_command(shlex.split(typed), config_folder=CONF, config_name="config")


@pytest.mark.parametrize("typed", WRONG)
def test_a_mistake_of_a_sweep_is_named_before_hydra_runs(typed: str) -> None:
    began = time.process_time()
    command = check(typed)
    assert sorted(mistake.setting.replace("'", "") for mistake in command.of_sweep) == sorted(WRONG[typed])
    assert command.of_sweep == command.mistakes or command.skips_invalid
    assert all(mistake.reason and mistake.fix for mistake in command.mistakes)
    assert time.process_time() - began < 5  # seconds: the time does not depend on the number of jobs


def test_the_folder_of_a_sweep_may_be_below_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/tmp")
    command = check("seed=1,2 hydra.sweep.dir=~/x")
    assert command.mistakes == []
    assert command.for_hydra == ["seed=1,2", "hydra.sweep.dir=/tmp/x"]


@pytest.mark.parametrize("typed", [f"{OPTUNA} hydra.sweeper.pruner=null hydra.sweeper.seed=null", "seed=range(1,5001)"])
def test_what_a_sweeper_takes_is_no_mistake(typed: str) -> None:
    assert check(typed).mistakes == []


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        (f"{OPTUNA} hydra.sweeper.ntrials=3", "hydra.sweeper.n_trials=3"),
        ("seed=1,2 hydra.sweeper.n_trials=3", "hydra/sweeper=optuna hydra.sweeper.n_trials=3"),
        (f"{OPTUNA} hydra.sweeper.direction=maximize", "sweep.direction=maximize"),
        ("seed=1,2 sweep.direction=max", "sweep.direction=maximize"),
        ("hydra/sweeper=optuna optimizer.lr=interval(1,0.1)", "'optimizer.lr=interval(0.1,1.0)'"),
        ("hydra/sweeper=optuna 'optimizer.lr=tag(lg,interval(0.1,1))'", "'optimizer.lr=tag(log,interval(0.1,1))'"),
        ("optimizer.lrr=1e-3,2e-3", "optimizer.lr=1e-3,2e-3"),
        ("sweep=lr,lr_and_batch", "sweep=<lr | lr_and_batch | model_ladder | optuna_lr | precision_by_strategy>"),
        (
            "sweep=lr optimizer.lr=1e-3",
            "the same command without optimizer.lr=1e-3, or optimizer.lr=<values with commas>",
        ),
        ("seed=1,2 launcher.devices_per_job=3", "launcher.devices_per_job=1, or strategy=ddp"),
        ("seed=1,2 resume=auto", "hydra.sweep.dir=<the folder of that sweep> instead of it"),
        ("'seed=range(1,3'", "'seed=range(1,3)'"),
        ("seed=1, 2, 3", "seed=1,2,3"),
        ("optimizer.lr=0,001", "optimizer.lr=0.001"),
        ("hydra/launcher=joblib seed=1,2", "launcher.max_jobs=<jobs at a time>"),
        ("hydra/sweeper=grid seed=1,2", "the same command without it"),
        ("hydra/sweeper=optuna 'warmup_steps=interval(0,4)'", "'warmup_steps=range(0,5)'"),
        ("hydra/sweeper=optuna 'optimizer.lr=tag(linear,interval(0.1,1))'", "'optimizer.lr=interval(0.1,1)'"),
        (f"{OPTUNA} hydra.sweeper.n_jobs=2", "launcher.max_jobs=2"),
        ("'model=glob(*_tiny)'", "model=<options with commas>"),
    ],
)
def test_a_mistake_of_a_sweep_is_answered_with_what_works(typed: str, fix: str) -> None:
    assert [mistake.fix for mistake in check(typed).mistakes] == [fix]


PARAMS = "hydra:\n  sweeper:\n    params:\n      optimizer.lr: 1e-3,2e-3\n"


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        (
            f"# @package _global_\ndefaults:\n  - none\n{PARAMS}".replace(".lr:", ".lrr:"),
            "optimizer.lr: 1e-3,2e-3 (in {}, line 7)",
        ),
        (f"defaults:\n  - none\n{PARAMS}", "# @package _global_ as the first line of {}"),
        (PARAMS, "# @package _global_ as the first line of {}"),
        (f"# @package _global_\n{PARAMS}", "defaults: [none] at the top of {}"),
    ],
)
def test_a_mistake_in_a_sweep_of_ones_own_names_its_file(text: str, fix: str, tmp_path: Path) -> None:
    file = tmp_path / "sweep" / "mine.yaml"
    file.parent.mkdir()
    file.write_text(text)
    mistakes = check(f"hydra.searchpath=[{tmp_path}] sweep=mine").mistakes
    assert [mistake.fix for mistake in mistakes] == [fix.format(file)]


def test_a_setting_of_a_sweep_is_refused_for_a_single_run() -> None:
    mistake, *others = reject_settings_of_sweep(
        ["seed=1", "hydra.sweep.dir=x", "launcher.max_jobs=2", "sweep.samples=8", "launcher.partition=a"]
    )
    assert [other.setting for other in others] == ["launcher.max_jobs=2", "sweep.samples=8"]
    assert (
        str(mistake)
        == "hydra.sweep.dir=x: only a sweep, which -m starts, reads it; type hydra.run.dir=x, or -m beside it"
    )
    assert reject_settings_of_sweep(["sweep=lr", "hydra.mode=RUN", "hydra.sweeper.n_trials=2"]) == []


def test_runs_of_a_module_of_ones_own_are_ranked_as_its_checkpoints_are_if_nothing_else_is_typed() -> None:
    own = "task=lightning task.module._target_=own_modules.Classifier data.module=null seed=1,2"
    assert check(own).ranking == []
    by_accuracy = f"{own} checkpoint.monitor=val_acc checkpoint.mode=max"
    assert check(by_accuracy).ranking == ["sweep.objective=val_acc", "sweep.direction=maximize"]
    assert check(f"{by_accuracy} sweep.objective=best_val_loss").ranking == []
    assert check("seed=1,2 checkpoint.monitor=val/loss").ranking == []


def test_policies_are_ranked_by_the_reward_that_ranks_their_checkpoints(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a", "reference": "b"}\n' * 64)
    policy = f"recipe=grpo data.path={prompts} reward=exact_match rollout.max_new_tokens=8 seed=1,2"
    assert check(policy).ranking == ["sweep.objective=val/reward", "sweep.direction=maximize"]
    assert check(f"{policy} sweep.objective=val/exact_match sweep.direction=maximize").ranking == []
    searched = check(f"{policy.rpartition(' ')[0]} hydra/sweeper=optuna optimizer.lr=interval(1e-6,1e-5)")
    assert searched.mistakes == [], "the pruner compares the same reward"
    composed = compose_overrides([*policy.split()[:-1], "hydra/sweeper=optuna"], CONF, "config")
    sweeper = composed.hydra.sweeper
    assert (sweeper.prune_on, sweeper.prune_direction) == ("val/reward", "maximize")
    assert check(f"{policy} scheduler=plateau").mistakes == [], "and so does the scheduler"
