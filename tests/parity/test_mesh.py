"""Ranks that divide matrices, sequences and layers give the curve of one device: real engines, real processes."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import ENGINES, IS_LONG, NUM_STEPS, case, largest_difference, mixed_case, packed_case, shortened

from recipes.model.gpt2 import GPT2
from recipes.model.weights.huggingface import export_pretrained

Rows = Callable[..., list[dict[str, float]]]

# two stages on each of two ranks need four layers
LAYERS = "model.num_layers=4"
KEY_VALUE_HEADS = "model.num_kv_heads=2"  # of two heads: one for each rank


def _case(name: str, *more: str, model: str = "gpt2", accumulate: int = 4, world_size: int = 2) -> dict[str, Any]:
    made = case(model, strategy=ENGINES[name], precision="32-true", accumulate=accumulate, world_size=world_size)
    return made | {"overrides": [*made["overrides"], LAYERS, *more]}


DEEP = "model.num_layers=8"  # several layers on each stage
AVERAGED = ("optimizer=schedule_free", "eval_every=3")  # averages are held during a validation, and then no more
SMOOTHED = ("label_smoothing=0.1", "z_loss=0.001")
SINGLE = {
    "gpt2": _case("single", accumulate=1, world_size=1),
    "untied": _case("single", "model.tie_embeddings=false", accumulate=1, world_size=1),
    "llama": _case("single", KEY_VALUE_HEADS, model="llama", accumulate=1, world_size=1),
    "deep": _case("single", DEEP, accumulate=1, world_size=1),
    "averaged": _case("single", *AVERAGED, accumulate=1, world_size=1),
    "smoothed": _case("single", *SMOOTHED, accumulate=1, world_size=1),
}
SINGLE = shortened(SINGLE, "gpt2", "untied", "llama", "smoothed")
TWO = {
    "gpt2, tp2 x1": _case("tp2", accumulate=1),
    "gpt2, tp2 x4": _case("tp2"),
    "untied, tp2, whole sequence x2": _case("tp2, whole sequence", "model.tie_embeddings=false", accumulate=2),
    "llama, tp2 x2": _case("tp2", KEY_VALUE_HEADS, model="llama", accumulate=2),
    "smoothed, tp2 x2": _case("tp2", *SMOOTHED, accumulate=2),
    "gpt2, cp2, ddp x4": _case("cp2, ddp"),
    "llama, cp2, fsdp x1": _case("cp2, fsdp", KEY_VALUE_HEADS, model="llama", accumulate=1),
    "gpt2, cp2, ZeRO-3 x2": _case("cp2, ZeRO-3", accumulate=2),
    "gpt2, pp2 x2": _case("pp2", accumulate=2),
    "gpt2, pp2 x4": _case("pp2"),
    "untied, pp2, interleaved x4": _case("pp2, interleaved", "model.tie_embeddings=false"),
    "llama, pp2, zero bubble x4": _case("pp2, zero bubble", KEY_VALUE_HEADS, model="llama"),
    "gpt2, pp2, zero bubble x2": _case("pp2, zero bubble", accumulate=2),
    "averaged, pp2 x2": _case("pp2", *AVERAGED, accumulate=2),
    "deep, pp2, zero bubble x4": _case("pp2, zero bubble", DEEP),
}
TWO = shortened(
    TWO,
    *("gpt2, tp2 x4", "untied, tp2, whole sequence x2", "smoothed, tp2 x2", "gpt2, cp2, ddp x4"),
    *("gpt2, cp2, ZeRO-3 x2", "gpt2, pp2 x4", "untied, pp2, interleaved x4", "llama, pp2, zero bubble x4"),
)
MORE = {
    "gpt2, pp2, zero bubble x1": _case("pp2, zero bubble", accumulate=1),
    "gpt2, pp2, zero bubble x4": _case("pp2, zero bubble"),
    "deep, pp2, interleaved x4": _case("pp2, interleaved", DEEP),
    "deep, pp2 x4": _case("pp2", DEEP),
    "gpt2, tp2, all logits x4": _case("tp2, all logits"),
    "gpt2, tp2, cpu offload x4": _case("tp2, cpu offload"),
    "gpt2, tp2, per step x4": _case("tp2", "strategy.gradient_sync=per_step"),
    "gpt2, tp2, recomputed x2": _case("tp2", "activation_checkpoint=full", accumulate=2),
    "gpt2, cp2, ZeRO-2 x4": _case("cp2, ZeRO-2"),
    "gpt2, cp2, ddp x1": _case("cp2, ddp", accumulate=1),
    "smoothed, pp2 x4": _case("pp2", *SMOOTHED),
    "gpt2, pp2, all logits x4": _case("pp2", "loss_chunk_tokens=null"),
    "gpt2, pp2, recomputed x4": _case("pp2", "activation_checkpoint=full"),
    **{f"gpt2, {name}, compiled x4": _case(name, "compile=true") for name in ("tp2", "cp2, fsdp", "pp2")},
    "llama, pp2 x8": _case("pp2", KEY_VALUE_HEADS, model="llama", accumulate=8),
}
FOUR = {
    "gpt2, tp2 of 4 x2": _case("tp2", accumulate=2, world_size=4),
    "gpt2, tp2, cp2 x2": _case("tp2, cp2", accumulate=2, world_size=4),  # one head a rank: keys are gathered
    "llama, pp2, tp2 x2": _case("pp2, tp2", KEY_VALUE_HEADS, model="llama", accumulate=2, world_size=4),
}
FOUR = shortened(FOUR, "gpt2, tp2, cp2 x2", "llama, pp2, tp2 x2")
MORE_ON_FOUR = {
    "gpt2, tp2, two replicas x4": _case("tp2, two replicas", world_size=4),
    "gpt2, pp2 of 4 x2": _case("pp2", accumulate=2, world_size=4),
    "gpt2, pp2, cp2 x4": _case("pp2, cp2", world_size=4),
    "llama, cp2, ZeRO-3 of 4 x1": _case("cp2, ZeRO-3", KEY_VALUE_HEADS, model="llama", accumulate=1, world_size=4),
    "llama, tp2, cp2 x1": _case("tp2, cp2", KEY_VALUE_HEADS, model="llama", accumulate=1, world_size=4),
}
EIGHT = {"gpt2, pp2, tp2 of 8 x2": _case("pp2, tp2", accumulate=2, world_size=8)}


def _check(rows: Rows, found: list[dict[str, float]], name: str) -> None:
    """Assert the curve and the validation of one device: float32 sums in another order differ by less than 1e-6."""
    reference = rows("mesh single", SINGLE, name.partition(",")[0], world_size=1)
    assert len(found) == NUM_STEPS
    assert max(largest_difference(found, reference).values()) <= 1e-5
    for row, other in zip(found, reference, strict=True):
        for metric in ("step", "train/samples", "train/tokens", "lr", "grad/clipped_fraction"):
            assert row.get(metric) == other.get(metric), metric
    for metric in ("val/loss", "val/perplexity", "val/token_accuracy"):
        assert math.isclose(found[-1][metric], reference[-1][metric], rel_tol=1e-6), metric


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_that_work_on_the_same_samples_give_the_curve_of_one_device(name: str, rows: Rows) -> None:
    _check(rows, rows("mesh two", TWO, name, world_size=2), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_so_they_do_with_every_way_to_keep_and_sum(name: str, rows: Rows) -> None:
    _check(rows, rows("mesh two, long", MORE, name, world_size=2), name)


@pytest.mark.parametrize("name", FOUR)
def test_two_dimensions_give_the_curve_of_one_device(name: str, rows: Rows) -> None:
    _check(rows, rows("mesh four", FOUR, name, world_size=4), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_ON_FOUR)
def test_so_do_other_pairs_of_dimensions(name: str, rows: Rows) -> None:
    _check(rows, rows("mesh four, long", MORE_ON_FOUR, name, world_size=4), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", EIGHT)
def test_three_dimensions_of_two_ranks_give_the_curve_of_one_device(name: str, rows: Rows) -> None:
    _check(rows, rows("mesh eight", EIGHT, name, world_size=8), name)


def test_rows_of_several_documents_are_learned_and_answered_as_on_one_device(
    rows: Rows, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = str(tmp_path_factory.mktemp("cache"))
    cases = {
        name: packed_case(name, LAYERS, world_size=2, cache_dir=folder)
        for name in ("cp2, fsdp", "pp2", *(("tp2", "cp2, ZeRO-3", "tp2, whole sequence") if IS_LONG else ()))
    }
    alone = {"single": packed_case("single", LAYERS, world_size=1, cache_dir=folder)}
    reference = rows("mesh packed alone", alone, "single", world_size=1)
    for name in cases:
        found = rows("mesh packed", cases, name, world_size=2)
        assert max(largest_difference(found, reference).values()) <= 1e-5, name
        assert found[-1]["val/exact_match"] == reference[-1]["val/exact_match"], name


def test_losses_and_tokens_of_each_source_of_a_mixture_are_those_of_one_device(
    rows: Rows, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = str(tmp_path_factory.mktemp("cache"))
    names = ("tp2", "pp2", *(("cp2, ddp",) if IS_LONG else ()))
    cases = {name: mixed_case(name, world_size=2) for name in names}
    alone = {"single": mixed_case("single", world_size=1)}
    for made in (*cases.values(), *alone.values()):
        made["overrides"].append(LAYERS)
        for node in made["data"]["sources"].values():
            node |= {"cache_dir": folder} if "tokenizer" in node else {}
    reference = rows("mesh mixed alone", alone, "single", world_size=1)
    for name in cases:
        found = rows("mesh mixed", cases, name, world_size=2)
        for row, other in zip(found, reference, strict=True):
            for metric in ("train/letters/loss", "train/noise/loss"):
                assert row.get(metric) == pytest.approx(other.get(metric), rel=1e-5), (name, metric)
            for metric in ("train/letters/tokens", "train/noise/tokens"):
                assert row.get(metric) == other.get(metric), (name, metric)
        assert found[-1]["val/letters/loss"] == pytest.approx(reference[-1]["val/letters/loss"], rel=1e-6), name


def test_stages_of_a_published_model_have_its_weights(rows: Rows, tmp_path: Path) -> None:
    theirs = GPT2(vocab_size=64, max_seq_len=16, num_layers=4, num_heads=2, hidden_size=32, dropout=0.0)
    theirs.init_weights(3)
    folder = tmp_path / "published"
    export_pretrained(theirs, folder)
    found = {}
    for name in ("single", "pp2"):
        size = 1 if name == "single" else 2
        cases = {name: _case(name, f"model.pretrained={folder}", accumulate=size, world_size=size)}
        found[name] = rows(f"mesh published, {name}", cases, name, world_size=size)
    assert max(largest_difference(found["pp2"], found["single"]).values()) <= 1e-5
    drawn = rows("mesh single", SINGLE, "gpt2", world_size=1)
    assert largest_difference(found["single"], drawn)["train/loss"] > 1e-4  # the control


def test_stages_in_bfloat16_follow_one_device_in_bfloat16(rows: Rows) -> None:
    """Within its rounding, 2^-8: sums over stages and micro-batches are in another order."""
    found = {}
    for name in ("single", "pp2"):
        size = 1 if name == "single" else 2
        cases = {name: _case(name, "precision=bf16-true", accumulate=size, world_size=size)}
        found[name] = rows(f"mesh bf16-true, {name}", cases, name, world_size=size)
    assert largest_difference(found["pp2"], found["single"])["train/loss"] < 2**-8


def test_the_curve_of_another_size_is_another_one(rows: Rows) -> None:
    """The control of the tests above."""
    gpt2 = rows("mesh single", SINGLE, "gpt2", world_size=1)
    assert largest_difference(rows("mesh single", SINGLE, "untied", world_size=1), gpt2)["train/loss"] > 1e-4
