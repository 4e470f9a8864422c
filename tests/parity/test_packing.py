"""Packed examples and mixtures under every strategy: the curve of one device, of each source, and the same answers."""

from typing import Any

import pytest
from cases import largest_difference, mixed_case, packed_case, shortened, with_cache_dir

ON_ONE = {
    f"{model}, {accumulate}": packed_case("single", world_size=1, accumulate=accumulate, model=model)
    for model, accumulate in (("gpt2", 1), ("gpt2", 4), ("llama", 1))
}
ON_ONE["recomputed"] = packed_case("single", "activation_checkpoint=selective", world_size=1)
ON_ONE |= {f"mixture, {accumulate}": mixed_case("single", world_size=1, accumulate=accumulate) for accumulate in (1, 4)}
ON_ONE["mixture, all logits"] = mixed_case("single", world_size=1, accumulate=1, more=("loss_chunk_tokens=null",))
ON_TWO = {
    name: packed_case(name, world_size=2) for name in ("ddp", "fsdp", "fsdp, cpu offload", "ZeRO-1", "ZeRO-2", "ZeRO-3")
}
MIXED_ON_TWO = {f"mixture, {name}": mixed_case(name, world_size=2) for name in ("ddp", "fsdp", "ZeRO-3")}
ON_TWO["llama, fsdp"] = packed_case("fsdp", world_size=2, model="llama")
ON_TWO = shortened(ON_TWO, "ddp", "llama, fsdp", "ZeRO-3")
MIXED_ON_TWO = shortened(MIXED_ON_TWO, "mixture, fsdp")


@pytest.fixture(scope="session")
def with_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = str(tmp_path_factory.mktemp("examples"))

    def fill(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        return {name: made | {"data": with_cache_dir(made["data"], folder)} for name, made in cases.items()}

    return fill


@pytest.fixture
def on_one(rows: Any, with_cache: Any) -> Any:
    return lambda name: rows("packing", with_cache(ON_ONE), name, world_size=1)


@pytest.fixture
def on_two(rows: Any, with_cache: Any) -> Any:
    return lambda name: rows("packing on two", with_cache(ON_TWO | MIXED_ON_TWO), name, world_size=2)


def assert_same_curve(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    difference = largest_difference(found, expected)
    # float32: other orders of the same sums, over eight steps of a loss that halves
    assert difference["train/loss"] < 1e-5
    assert difference["grad/norm"] < 1e-4
    assert found[-1]["val/loss"] == pytest.approx(expected[-1]["val/loss"], rel=1e-5)
    # the mean of numbers made of the answers: equal if all 21 texts are
    assert found[-1]["val/exact_match"] == pytest.approx(expected[-1]["val/exact_match"], rel=1e-6)


@pytest.mark.parametrize("name", ["gpt2, 4", "recomputed"])
def test_micro_batches_and_recomputation_keep_the_curve_of_packed_examples(name: str, on_one: Any) -> None:
    assert_same_curve(on_one(name), on_one("gpt2, 1"))


@pytest.mark.parametrize("name", ON_TWO)
def test_every_strategy_has_the_curve_and_the_answers_of_one_device(name: str, on_one: Any, on_two: Any) -> None:
    assert_same_curve(on_two(name), on_one("llama, 1" if "llama" in name else "gpt2, 1"))


def assert_same_mixture(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert_same_curve(found, expected)
    for row, other in zip(found, expected, strict=True):
        names = [name for name in row if name.startswith(("train/letters/", "train/noise/"))]
        assert len(names) == 4
        assert {name: row[name] for name in names} == pytest.approx({name: other[name] for name in names}, rel=1e-5)
    last = {name: value for name, value in found[-1].items() if name.startswith("val/") and name.count("/") == 2}
    assert {"val/letters/loss", "val/noise/loss", "val/other/loss"} <= set(last)
    assert last == pytest.approx({name: expected[-1][name] for name in last}, rel=1e-5)


@pytest.mark.parametrize("name", ["mixture, 4", "mixture, all logits"])
def test_micro_batches_and_all_logits_keep_the_losses_of_each_source(name: str, on_one: Any) -> None:
    assert_same_mixture(on_one(name), on_one("mixture, 1"))


@pytest.mark.parametrize("name", MIXED_ON_TWO)
def test_every_strategy_has_the_losses_of_each_source_of_one_device(name: str, on_one: Any, on_two: Any) -> None:
    assert_same_mixture(on_two(name), on_one("mixture, 1"))


def test_the_loss_of_a_step_is_that_of_its_sources_by_their_targets(on_one: Any) -> None:
    rows = on_one("mixture, 1")
    tokens = {name: [row[f"train/{name}/tokens"] for row in rows] for name in ("letters", "noise")}
    # 16 samples a step: 0.7 of the first 51 are letters, 0.4 of those after; a row of noise has 48 tokens
    assert [16 * (index + 1) - tokens["noise"][index] / 48 for index in (0, 2, 7)] == [11, 34, 67]
    assert 0.8 * 48 * 67 < tokens["letters"][7] < 48 * 67, "the rest of a packed row is padding"
    assert [sum(pair) for pair in zip(*tokens.values(), strict=True)] == [row["train/tokens"] for row in rows]
    for row in rows:
        low, high = sorted((row["train/letters/loss"], row["train/noise/loss"]))
        assert low < row["train/loss"] < high
