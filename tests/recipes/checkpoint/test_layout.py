"""State that could not be loaded again is found when it is saved, and named."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from recipes.checkpoint.layout import are_equal, merge_optimizer_values, serialize
from recipes.errors import ConfigError


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


class Saved:
    """Plain data of a rank as a checkpoint holds it."""

    def __init__(self, optimizer: dict[str, Any]) -> None:
        self._content = serialize({"optimizer": optimizer})

    def read(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(self._content), dtype=torch.uint8)  # [bytes]


def make_checkpoint(*of_ranks: dict[str, Any]) -> dict[str, Any]:
    values = {rank: Saved(values) for rank, values in enumerate(of_ranks)}
    return {"optimizer": "Keeper", "values": values, "rng": [{} for _ in of_ranks]}


def test_each_rank_of_the_same_mesh_gets_its_own_values_and_those_that_others_saved() -> None:
    first = {"parameters": {"a": {"size": 1.0}, "b": {"size": 3.0}}, "groups": [{"d": 0.5}], "top": {"k": 1}}
    second = {"parameters": {"a": {"size": 2.0}}, "groups": [{"d": 0.25}], "others": {"whole": {"n": 4}}}
    checkpoint = make_checkpoint(first, second)
    assert merge_optimizer_values(checkpoint, rank=1, is_same_mesh=True) == {
        "parameters": {"a": {"size": 2.0}, "b": {"size": 3.0}},
        "groups": [{"d": 0.25}],
        "others": {"whole": {"n": 4}},
        "top": {},
    }


def test_a_value_that_only_another_rank_has_changed_is_not_taken() -> None:
    checkpoint = make_checkpoint({"groups": [{"d": 5.0}, {}]}, {"groups": [{}, {"d": 7.0}]})
    assert merge_optimizer_values(checkpoint, rank=1, is_same_mesh=True)["groups"] == [{}, {"d": 7.0}]
    with pytest.raises(ConfigError, match="its ranks keep different values of its groups"):
        merge_optimizer_values(checkpoint, rank=1, is_same_mesh=False)


def test_another_mesh_takes_values_on_which_all_ranks_agree_and_no_others() -> None:
    one = {"parameters": {"a": {"history": [torch.arange(3.0)], "phase": "first"}}}
    same = {"parameters": {"a": {"history": [torch.arange(3.0)], "phase": "first"}, "b": {"phase": "later"}}}
    merged = merge_optimizer_values(make_checkpoint(one, same), rank=5, is_same_mesh=False)
    assert are_equal(merged["parameters"], same["parameters"])
    other = {"parameters": {"a": {"history": [torch.arange(3.0) + 1e-7], "phase": "first"}}}
    with pytest.raises(ConfigError, match="its ranks keep different values of a/history"):
        merge_optimizer_values(make_checkpoint(one, other), rank=0, is_same_mesh=False)


def test_values_are_equal_in_type_and_bits() -> None:
    assert are_equal({"a": [1, float("nan"), "x", None]}, {"a": [1, float("nan"), "x", None]})
    for one, other in ((1, 1.0), ([1], (1,)), ({"a": 1}, {"b": 1}), (torch.ones(1), torch.ones(1).double())):
        assert not are_equal(one, other)
