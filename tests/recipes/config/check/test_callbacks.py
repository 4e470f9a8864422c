"""Callbacks of other packages: those that change what a setting controls are refused, with that setting."""

import shlex
from pathlib import Path

import pytest

from recipes.config import compose_and_check

LIGHTNING = "lightning.pytorch.callbacks"
# class -> the setting that its answer names; None: it is accepted
CLASSES = {
    "GradientAccumulationScheduler": "micro_batch_size=",
    "StochasticWeightAveraging": "ema_decay=",
    "WeightAveraging": "ema_decay=",
    "EMAWeightAveraging": "ema_decay=",
    "LearningRateFinder": "mode=lr_find",
    "BatchSizeFinder": "mode=batch_find",
    "ModelCheckpoint": "save_every=",
    "OnExceptionCheckpoint": "save_every=",
    "BackboneFinetuning": "adapter=",
    "ModelPruning": "mode=export",
    "SpikeDetection": "loss_spike",
    "Timer": None,
    "LearningRateMonitor": None,
    "LambdaCallback": None,
    "DeviceStatsMonitor": None,
    "RichModelSummary": None,
}


def check(typed: str) -> list[str]:
    return [str(mistake) for mistake in compose_and_check(shlex.split(typed))[1]]


def test_callbacks_that_change_what_a_setting_controls_are_refused_with_that_setting() -> None:
    mistakes = check(" ".join(f"+callbacks.x{name}._target_={LIGHTNING}.{name}" for name in CLASSES))
    of_class = {name: [text for text in mistakes if f"callbacks.x{name}._target_" in text] for name in CLASSES}
    for name, setting in CLASSES.items():
        assert len(of_class[name]) == (setting is not None), of_class[name]
        assert all(
            setting in text and f"the same command without callbacks.x{name}" in text
            for text in of_class[name]
            if setting
        )


def test_a_subclass_of_it_is_refused_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_callbacks.py").write_text(
        f"import {LIGHTNING} as lc\n\nclass Mine(lc.ModelCheckpoint):\n    pass\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    [mistake] = check("+callbacks.x._target_=own_callbacks.Mine")
    assert "it saves beside checkpoint=" in mistake


def test_a_class_that_is_no_callback_is_said_to_be_none() -> None:
    assert check("+callbacks.x._target_=torch.nn.Linear +callbacks.x.in_features=2") == [
        "callbacks.x._target_=torch.nn.Linear: it is a class, but not a subclass of Lightning's Callback;"
        " type the same command without callbacks.x"
    ]


def test_a_second_progress_bar_is_answered_with_the_removal_of_the_first() -> None:
    added = f"+callbacks.x._target_={LIGHTNING}.TQDMProgressBar"
    [mistake] = check(added)
    assert mistake.endswith("callbacks.progress is a progress bar, and a run has one; type '~callbacks.progress'")
    assert check(f"~callbacks.progress {added}") == []


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        (f"+callbacks.x._target_={LIGHTNING}.EarlyStopping", "+callbacks.x.monitor=<value>"),
        (
            f"+callbacks.x._target_={LIGHTNING}.LearningRateMonitor +callbacks.x.logging_intervall=step",
            "+callbacks.x.logging_interval=step",
        ),
    ],
)
def test_arguments_of_an_added_callback_are_answered_with_an_addition(typed: str, fix: str) -> None:
    [mistake] = compose_and_check(shlex.split(typed))[1]
    assert mistake.fix == fix
