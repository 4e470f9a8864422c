"""State that could not be loaded again is found when it is saved, and named."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from recipes.checkpoint.layout import serialize


class Mine(Callback):
    """Has a state that no checkpoint may hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"path": Path("x")}


def test_plain_data_survives_a_round_trip() -> None:
    plain = {"step": 3, "groups": [{"lr": 0.1, "betas": (0.9, 0.95)}], "none": None}
    loaded = torch.load(io.BytesIO(serialize(plain)), weights_only=True)
    assert loaded == plain


@pytest.mark.parametrize("value", [Path("x"), np.float64(1.0), lambda: None])
def test_state_that_is_not_plain_data_is_named(value: Any) -> None:
    plain = {"step": 3, "callbacks": {"Throughput": {"seen": 1}, "Mine": {"deep": [value]}}}
    with pytest.raises(TypeError, match="the state under callbacks/Mine is not plain data: "):
        serialize(plain)


def test_a_run_continues_and_reports_a_callback_whose_state_cannot_be_saved(train, tmp_path: Path) -> None:
    ended = train(tmp_path, callbacks=[Mine()])
    assert ended.exit_code == 74
    failed = [line for line in ended.lines if line.startswith("Could not save")]
    assert len(failed) == 2
    assert "TypeError: the state under callbacks/Mine is not plain data" in failed[0]
