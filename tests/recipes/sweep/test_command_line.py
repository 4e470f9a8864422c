"""Mistakes of a sweep itself, found before Hydra builds its sweeper, composes jobs or creates a folder."""

import shlex
import time

import pytest

from recipes.config.compose import CONF
from recipes.sweep.command_line import SweepCommand, check_command

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
}


def check(typed: str) -> SweepCommand:
    return check_command(shlex.split(typed), config_folder=CONF, config_name="config")


@pytest.mark.parametrize("typed", WRONG)
def test_a_mistake_of_a_sweep_is_named_before_hydra_runs(typed: str) -> None:
    began = time.process_time()
    command = check(typed)
    assert sorted(mistake.setting.replace("'", "") for mistake in command.mistakes) == sorted(WRONG[typed])
    assert command.of_sweep == command.mistakes
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
