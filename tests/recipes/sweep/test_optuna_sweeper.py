"""A study of real runs: resumed after a kill with nothing lost, and a bad trial is pruned."""

import json
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState
from support import write_texts
from sweeping import Sweeps, wait_until

TWELVE = (
    "hydra/sweeper=optuna",
    "optimizer.lr=tag(log,interval(1e-4,1e-1))",
    "hydra.sweeper.n_trials=12",
    "hydra.sweeper.pruner=null",
    "launcher.max_jobs=2",
)


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sweeps]:
    folder = tmp_path_factory.mktemp("studies")
    sweeps = Sweeps(folder, str(write_texts(folder / "texts")))
    yield sweeps
    for started in sweeps.started:
        started.kill()


def load_trials(sweep: Path) -> list[optuna.trial.FrozenTrial]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.load_study(storage=f"sqlite:///{sweep / 'study.db'}", study_name="sweep").trials


def num_finished(sweeps: Sweeps) -> int:
    """Count the trials recorded as finished."""
    if not (sweeps.folder / "twelve/sweep.csv").exists():
        return 0
    return sum(row["state"] == "finished" for row in sweeps.board("twelve"))


@pytest.mark.timeout(600)
def test_a_study_killed_after_five_of_twelve_trials_resumes_with_nothing_lost(
    sweeps: Sweeps,
) -> None:
    folder = sweeps.folder / "twelve"
    run = sweeps.start("twelve", *TWELVE)
    wait_until(lambda: num_finished(sweeps) >= 5, 200)
    run.process.kill()
    run.end()
    wait_until(lambda: not run.left(), 20)
    before = {trial.number: trial for trial in load_trials(folder)}
    recorded = {number: trial.value for number, trial in before.items() if trial.value is not None}
    assert len(recorded) >= 5

    exit_code, output = sweeps.run("twelve", *TWELVE)
    assert exit_code == 0, output
    after = load_trials(folder)
    assert [trial.state for trial in after] == [TrialState.COMPLETE] * 12
    assert {number: after[number].value for number in recorded} == recorded
    # the trial that was being proposed may have had some of its parameters only
    assert all(trial.params.items() <= after[number].params.items() for number, trial in before.items())
    board = sweeps.board("twelve")
    assert [row["state"] for row in board] == ["finished"] * 12
    losses = [float(row["best_val_loss"]) for row in board]
    assert losses == sorted(losses)
    assert sorted(losses) == sorted(trial.value for trial in after if trial.value is not None)


@pytest.mark.timeout(300)
def test_a_trial_with_a_validation_loss_worse_than_the_median_is_pruned(
    sweeps: Sweeps,
) -> None:
    exit_code, output = sweeps.run(
        "pruned",
        "hydra/sweeper=optuna",
        "optimizer.lr=1e-3,10.0",
        "hydra.sweeper.n_trials=2",
        "hydra.sweeper.seed=5",  # proposes 1e-3 first
        "hydra.sweeper.pruner.n_startup_trials=1",
        "trainer.max_steps=120",
        "seed=1",
        seconds_a_step=0.03,
    )
    assert exit_code == 0, output
    trials = load_trials(sweeps.folder / "pruned")
    states = {trial.params["optimizer.lr"]: trial.state for trial in trials}
    assert states["10.0"] is TrialState.PRUNED, (output, states)
    assert TrialState.COMPLETE in states.values()
    [pruned] = [row for row in sweeps.board("pruned") if row["optimizer.lr"] == "10.0"]
    summary = json.loads((sweeps.folder / "pruned" / pruned["folder"] / "summary.json").read_text())
    assert 2 <= summary["steps"] < 90, "stopped before its end"
    assert pruned["state"] == "pruned"
    assert "is pruned at step" in output
