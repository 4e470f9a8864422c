"""A study that cannot be opened is a mistake with what to type; its settings are checked with the command line."""

from pathlib import Path
from typing import Any

import optuna
import pytest

from recipes.errors import ConfigError
from recipes.sweep.optuna_sweeper import OptunaSweeper


def make_sweeper(**changes: Any) -> OptunaSweeper:
    settings: dict[str, Any] = {
        "params": None,
        "n_trials": 3,
        "sampler": optuna.samplers.RandomSampler,
        "pruner": None,
        "prune_on": "val/loss",
        "prune_direction": "minimize",
        "seed": 1,
        "storage": None,
    }
    return OptunaSweeper(**settings | changes)


def test_a_damaged_study_is_named_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "study.db").write_text("junk\n" * 2000)
    with pytest.raises(ConfigError, match="the study cannot be opened") as raised:
        make_sweeper()._open_study(tmp_path, "minimize")
    assert raised.value.fix.endswith(f"rm {tmp_path / 'study.db'}")
