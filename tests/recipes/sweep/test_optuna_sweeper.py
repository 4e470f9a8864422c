"""A study of real runs: killed in its sixth trial it goes on to its twelfth, and a bad trial is stopped early."""

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
    for one in sweeps.started:
        one.kill()


def trials_of(sweep: Path) -> list[optuna.trial.FrozenTrial]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.load_study(storage=f"sqlite:///{sweep / 'study.db'}", study_name="sweep").trials


def num_finished(sweeps: Sweeps) -> int:
    """Trials that the study has been told of."""
    if not (sweeps.folder / "twelve/sweep.csv").exists():
        return 0
    return sum(row["state"] == "finished" for row in sweeps.board("twelve"))


@pytest.mark.timeout(600)
def test_a_study_of_twelve_killed_after_five_goes_on_to_twelve_with_nothing_lost(
    sweeps: Sweeps,
) -> None:
    folder = sweeps.folder / "twelve"
    run = sweeps.start("twelve", *TWELVE)
    wait_until(lambda: num_finished(sweeps) >= 5, 200)
    run.process.kill()
    run.end()
    wait_until(lambda: not run.left(), 20)
    before = {trial.number: trial for trial in trials_of(folder)}
    kept = {number: trial.value for number, trial in before.items() if trial.value is not None}
    assert len(kept) >= 5

    exit_code, said = sweeps.run("twelve", *TWELVE)
    assert exit_code == 0, said
    after = trials_of(folder)
    assert [trial.state for trial in after] == [TrialState.COMPLETE] * 12
    assert {number: after[number].value for number in kept} == kept
    assert all(after[number].params == trial.params for number, trial in before.items())
    board = sweeps.board("twelve")
    assert [row["state"] for row in board] == ["finished"] * 12
    losses = [float(row["best_val_loss"]) for row in board]
    assert losses == sorted(losses)
    assert sorted(losses) == sorted(trial.value for trial in after if trial.value is not None)


@pytest.mark.timeout(300)
def test_a_trial_whose_validation_loss_is_worse_than_the_median_is_stopped_early(
    sweeps: Sweeps,
) -> None:
    exit_code, said = sweeps.run(
        "pruned",
        "hydra/sweeper=optuna",
        "optimizer.lr=1e-3,10.0",
        "hydra.sweeper.n_trials=2",
        "hydra.sweeper.seed=5",  # proposes the two in this order
        "hydra.sweeper.pruner.n_startup_trials=1",
        "trainer.max_steps=200",
        "seed=1",
        seconds_a_step=0.03,
    )
    assert exit_code == 0, said
    trials = trials_of(sweeps.folder / "pruned")
    states = {trial.params["optimizer.lr"]: trial.state for trial in trials}
    assert states["10.0"] is TrialState.PRUNED, (said, states)
    assert TrialState.COMPLETE in states.values()
    [pruned] = [row for row in sweeps.board("pruned") if row["optimizer.lr"] == "10.0"]
    summary = json.loads((sweeps.folder / "pruned" / pruned["folder"] / "summary.json").read_text())
    assert 2 <= summary["steps"] < 150, "stopped before its end"
    assert pruned["state"] == "pruned"
    assert "is pruned at step" in said
