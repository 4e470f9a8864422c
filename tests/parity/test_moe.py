"""Mixtures of experts: the curve of one device under every strategy, in any split, and biases that are its own."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases import COMMON, ENGINES, GLOBAL_BATCH_SIZE, IS_LONG, TOKENS, count_data_ranks, largest_difference, shortened
from ranks import run_on_ranks

Rows = Callable[..., list[dict[str, float]]]

NUM_STEPS = 20 if IS_LONG else 8
MODEL = [
    *("data=random_tokens", "model=mixtral_nano", "model.vocab_size=64", "model.max_seq_len=16", "model.num_layers=2"),
    *("model.num_heads=2", "model.num_kv_heads=1", "model.hidden_size=32", "model.moe_intermediate_size=32"),
    *("model.num_experts=4", "optimizer.lr=1e-3"),
]
DEEPSEEK = [
    *("data=random_tokens", "model=deepseek_v3", "model.vocab_size=64", "model.max_seq_len=16", "model.num_layers=4"),
    *("model.first_k_dense_replace=1", "model.num_heads=2", "model.num_kv_heads=2", "model.hidden_size=32"),
    *("model.ffn_hidden_size=48", "model.moe_intermediate_size=32", "model.q_lora_rank=16", "model.kv_lora_rank=16"),
    *("model.qk_nope_head_dim=8", "model.qk_rope_head_dim=4", "model.v_head_dim=8", "model.num_experts=8"),
    *("model.num_experts_per_tok=2", "model.n_group=4", "model.topk_group=2"),
    *("model.router_aux_loss_coef=0", "optimizer.lr=1e-3"),
]
TERMS = ["model.router_aux_loss_coef=0.01", "model.router_z_loss=0.001", "model.balance_rate=0.01"]
BIAS = ["model.balance_rate=0.01"]
# two ranks do not divide three experts: FSDP2 divides the rows of each
THREE = ["model.num_experts=3", "model.scoring_func=sigmoid", "model.router_aux_loss_coef=0.01"]
RECOMPUTED = "activation_checkpoint=full"
RAGGED = {"_target_": "support.RaggedTokens", "num_samples": 50, "seq_len": 192, "vocab_size": 64}
DEEP = "model.num_layers=6"  # stages of several layers


def case(
    name: str,
    *more: str,
    world_size: int,
    accumulate: int = 1,
    precision: str = "32-true",
    model: list[str] = TERMS,
    base: list[str] = MODEL,
) -> dict[str, Any]:
    """Return one way to run the experiment."""
    strategy = ENGINES[name] if name in ENGINES else name.split()
    micro_batch_size = GLOBAL_BATCH_SIZE // (accumulate * count_data_ranks(strategy, world_size))
    sizes = [f"micro_batch_size={micro_batch_size}", f"trainer.devices={world_size}", f"precision={precision}"]
    steps = [f"trainer.max_steps={NUM_STEPS}", f"eval_every={NUM_STEPS}"]
    return {"overrides": [*base, *model, *COMMON, *strategy, *sizes, *steps, *more], "data": TOKENS}


def ragged(name: str, *more: str, world_size: int, accumulate: int = 1, model: list[str] = TERMS) -> dict[str, Any]:
    """Return the experiment on rows of 1 to 192 tokens, which each micro-batch pads to the longest of its own."""
    sizes = ("model.max_seq_len=192", "trainer.max_steps=4", "eval_every=4", "callbacks=[grad_norm,throughput]")
    made = case(name, *sizes, *more, world_size=world_size, accumulate=accumulate, model=model)
    return made | {"data": RAGGED}


SINGLE = {
    "ragged, terms": ragged("single", world_size=1),
    "ragged, terms x4": ragged("single", world_size=1, accumulate=4),
    "ragged, terms x16": ragged("single", world_size=1, accumulate=16),
    "ragged, bias": ragged("single", world_size=1, model=BIAS),
    "x1": case("single", world_size=1),
    "x4": case("single", world_size=1, accumulate=4),
    "three experts": case("single", world_size=1, model=THREE),
    "no terms": case("single", world_size=1, model=BIAS),
    "bfloat16": case("single", world_size=1, accumulate=2, precision="bf16-mixed"),
    "six layers": case("single", DEEP, world_size=1),
    "deepseek": case("single", world_size=1, model=BIAS, base=DEEPSEEK),
}
TWO = {
    "ddp x4": case("ddp", world_size=2, accumulate=4),
    "fsdp x4": case("fsdp", world_size=2, accumulate=4),
    "fsdp recomputed": case("fsdp", RECOMPUTED, world_size=2),
    "ep2 x1": case("ep2", world_size=2),
    "ep2 x4, recomputed": case("ep2", RECOMPUTED, world_size=2, accumulate=4),
    "ep2 x2, per step": case("ep2", "strategy.gradient_sync=per_step", world_size=2, accumulate=2),
    "ep2, cpu offload": case("ep2", "strategy.cpu_offload=true", world_size=2),
    "ZeRO-2 x4": case("ZeRO-2", world_size=2, accumulate=4),
    "ZeRO-3 recomputed": case("ZeRO-3", RECOMPUTED, world_size=2),
}
TWO = shortened(TWO, "ddp x4", "fsdp x4", "ep2 x1", "ep2 x4, recomputed", "ZeRO-3 recomputed")
OTHERS = {
    "deepseek": case("ep2", "context_parallel_size=2", world_size=2, model=BIAS, base=DEEPSEEK),
    "three experts": case("fsdp", world_size=2, model=THREE),
    "no terms": case("strategy=ddp context_parallel_size=2", world_size=2, model=BIAS),
}
# name -> the run on one device that it follows
STAGES = {
    "pp2 x2": (case("pp2", world_size=2, accumulate=2), "x1"),
    "pp2, six layers, recomputed x4": (case("pp2", DEEP, RECOMPUTED, world_size=2, accumulate=4), "six layers"),
    "pp2, zero bubble x4": (case("pp2, zero bubble", DEEP, world_size=2, accumulate=4), "six layers"),
    "deepseek, pp2, zero bubble x4": (
        case("pp2, zero bubble", world_size=2, accumulate=4, model=BIAS, base=DEEPSEEK),
        "deepseek",
    ),
}
STAGES = shortened(STAGES, "pp2, six layers, recomputed x4", "deepseek, pp2, zero bubble x4")
FOUR = {
    "ep2 of 4 x2": (case("ep2", world_size=4, accumulate=2), "x1"),
    "ep2, two replicas x1": (case("ep2, two replicas", world_size=4), "x1"),
    "ep4, cp2 x2": (case("ep4, cp2", world_size=4, accumulate=2, model=BIAS), "no terms"),
    "pp2, ep2, zero bubble x4": (case("pp2, ep2, zero bubble", DEEP, world_size=4, accumulate=4), "six layers"),
    # the first stage has the layer without experts alone
    "deepseek, pp4 x4": (
        case("strategy=fsdp pipeline_parallel_size=4", world_size=4, accumulate=4, model=BIAS, base=DEEPSEEK),
        "deepseek",
    ),
}
FOUR = shortened(FOUR, "ep4, cp2 x2", "pp2, ep2, zero bubble x4")
MORE_ON_FOUR = {
    "ep4 x4": (case("ep4", world_size=4, accumulate=4), "x1"),
    "pp2, ep2 x2": (case("pp2, ep2", world_size=4, accumulate=2), "x1"),
    "pp2, interleaved x4": (case("pp2, interleaved", DEEP, world_size=4, accumulate=4), "six layers"),
}
COMPILED = {"ep2 x4": case("ep2", "compile=true", world_size=2, accumulate=4)}
LOW = {f"{name}, bfloat16": case(name, world_size=2, precision="bf16-mixed") for name in ("fsdp", "ep2", "ZeRO-3")}
LOW = shortened(LOW, "ep2, bfloat16")
# name -> the run on one device that it follows
RAGGED_ON_TWO = {
    "ragged, ep2 x4": (ragged("ep2", world_size=2, accumulate=4), "ragged, terms"),
    "ragged, cp2": (ragged("cp2, ddp", world_size=2, accumulate=2, model=BIAS), "ragged, bias"),
    "ragged, pp2 x4": (ragged("pp2", world_size=2, accumulate=4), "ragged, terms"),
    "ragged, ddp x2": (ragged("ddp", world_size=2, accumulate=2), "ragged, terms"),
    "ragged, fsdp recomputed": (ragged("fsdp", RECOMPUTED, world_size=2), "ragged, terms"),
    "ragged, ZeRO-3 x2": (ragged("ZeRO-3", world_size=2, accumulate=2), "ragged, terms"),
}
RAGGED_ON_TWO = shortened(RAGGED_ON_TWO, "ragged, ep2 x4", "ragged, cp2")
ALL = TWO | OTHERS | LOW | {name: made for name, (made, _) in RAGGED_ON_TWO.items()}


def _equal(rows: list[dict[str, float]], reference: list[dict[str, float]]) -> None:
    """Assert equal curves, and the very same loads: a token at another expert would show in them."""
    assert len(rows) == NUM_STEPS
    assert max(largest_difference(rows, reference).values()) <= 1e-5
    for row, other in zip(rows, reference, strict=True):
        for name in ("moe/load_max", "moe/load_min"):
            assert row[name] == other[name], (row["step"], name)
        for name in ("moe/router_entropy", "moe/load_balance_loss", "moe/router_z_loss"):
            assert math.isclose(row.get(name, 0.0), other.get(name, 0.0), rel_tol=1e-5), (row["step"], name)


def test_one_device_gives_the_same_curve_however_it_splits_the_batch(rows: Rows) -> None:
    _equal(rows("moe single", SINGLE, "x4", world_size=1), rows("moe single", SINGLE, "x1", world_size=1))


def _equal_with_padding(rows: list[dict[str, float]], reference: list[dict[str, float]]) -> None:
    """Assert equal curves, loads and counts of tokens: padding, which depends on the split, is in none of them."""
    assert len(rows) == len(reference) == 4
    # float32: another order of the same sums. With padding in loads and terms it was 6e-5 and 1e-3
    assert max(largest_difference(rows, reference).values()) <= 1e-6
    for row, other in zip(rows, reference, strict=True):
        for name in ("moe/load_max", "moe/load_min", "train/tokens", "train/samples"):
            assert row[name] == other[name], (row["step"], name)
        for name in ("moe/router_entropy", "moe/load_balance_loss", "moe/router_z_loss"):
            assert math.isclose(row.get(name, 0.0), other.get(name, 0.0), rel_tol=1e-6), (row["step"], name)


@pytest.mark.parametrize("name", ["ragged, terms x4", "ragged, terms x16"])
def test_padding_is_in_no_load_no_term_and_no_count_however_the_batch_is_split(name: str, rows: Rows) -> None:
    found, expected = (rows("moe single", SINGLE, each, world_size=1) for each in (name, "ragged, terms"))
    _equal_with_padding(found, expected)


@pytest.mark.parametrize("name", RAGGED_ON_TWO)
def test_padding_is_in_none_of_them_on_two_ranks(name: str, rows: Rows) -> None:
    expected = rows("moe single", SINGLE, RAGGED_ON_TWO[name][1], world_size=1)
    _equal_with_padding(rows("moe two", ALL, name, world_size=2), expected)


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_give_the_curve_of_one_device(name: str, rows: Rows) -> None:
    _equal(rows("moe two", ALL, name, world_size=2), rows("moe single", SINGLE, "x1", world_size=1))


@pytest.mark.parametrize("name", OTHERS)
def test_other_experts_and_divided_sequences_give_the_curve_of_one_device_too(name: str, rows: Rows) -> None:
    _equal(rows("moe two", ALL, name, world_size=2), rows("moe single", SINGLE, name, world_size=1))


@pytest.mark.parametrize("name", STAGES)
def test_so_do_two_that_divide_the_layers(name: str, rows: Rows) -> None:
    cases = {name: made for name, (made, _) in STAGES.items()}
    _equal(rows("moe stages", cases, name, world_size=2), rows("moe single", SINGLE, STAGES[name][1], world_size=1))


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_give_the_curve_of_one_device(name: str, rows: Rows) -> None:
    cases = {name: made for name, (made, _) in FOUR.items()}
    _equal(rows("moe four", cases, name, world_size=4), rows("moe single", SINGLE, FOUR[name][1], world_size=1))


@pytest.mark.slow
def test_so_do_compiled_blocks(rows: Rows) -> None:
    found = rows("moe two, compiled", COMPILED, "ep2 x4", world_size=2)
    _equal(found, rows("moe single", SINGLE, "x1", world_size=1))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_ON_FOUR)
def test_so_do_four_that_have_one_expert_each(name: str, rows: Rows) -> None:
    cases = {name: made for name, (made, _) in MORE_ON_FOUR.items()}
    found = rows("moe four, long", cases, name, world_size=4)
    _equal(found, rows("moe single", SINGLE, MORE_ON_FOUR[name][1], world_size=1))


def test_the_load_of_the_rank_with_most_rows_lies_between_even_and_the_most_uneven(rows: Rows) -> None:
    for row in rows("moe two", ALL, "ep2 x1", world_size=2):
        assert 1 <= row["moe/rank_load_max"] <= min(2, row["moe/load_max"])
    assert "moe/rank_load_max" not in rows("moe two", ALL, "fsdp x4", world_size=2)[0]


@pytest.mark.parametrize("name", LOW)
def test_weights_of_experts_are_rounded_as_on_one_device(name: str, rows: Rows) -> None:
    # micro-batches of 8 sequences here and there: the same products, summed over ranks in another order
    found = rows("moe two", ALL, name, world_size=2)
    reference = rows("moe single", SINGLE, "bfloat16", world_size=1)
    assert math.isclose(found[0]["train/loss"], reference[0]["train/loss"], rel_tol=1e-6)
    assert math.isclose(found[0]["grad/norm"], reference[0]["grad/norm"], rel_tol=1e-5)
    assert largest_difference(found, reference)["train/loss"] <= 1e-4


def test_terms_of_the_objective_are_not_in_the_logged_loss(rows: Rows) -> None:
    with_terms = rows("moe single", SINGLE, "x1", world_size=1)
    without = rows("moe single", SINGLE, "no terms", world_size=1)
    assert with_terms[0]["train/loss"] == without[0]["train/loss"]
    assert with_terms[0]["grad/norm"] != without[0]["grad/norm"]
    assert "moe/load_balance_loss" not in without[0]


def test_a_resume_of_an_engine_that_divides_weights_has_the_same_biases(tmp_path: Path) -> None:
    more = ("model.balance_rate=0.1", "trainer.max_steps=3", "eval_every=3", "save_every=2")
    cases = {}
    for name in ("ZeRO-3", *(("fsdp",) if IS_LONG else ())):
        made = case(name, world_size=2, model=[])
        overrides = [text for text in made["overrides"] if text.partition("=")[0] not in {"save_every"}]
        cases[name] = made | {"overrides": [*overrides, *more]}
    results = run_on_ranks(cases, world_size=2, folder=tmp_path, worker=Path(__file__).parent / "resume_ranks.py")
    for name, result in results.items():
        assert "error" not in result, result["error"]
        for metric in ("train/loss", "grad/norm", "moe/load_max", "moe/load_min", "moe/router_entropy", "val/loss"):
            assert result["resumed"][metric] == result["uninterrupted"][metric], (name, metric)
