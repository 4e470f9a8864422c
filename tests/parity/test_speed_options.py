"""What makes a run faster or smaller keeps its curve: compilation, chunks, resharding, reduction, float8 on shards."""

from typing import Any

import pytest
from cases import IS_LONG, STRATEGIES, case, largest_difference

CHUNKS = "loss_chunk_tokens=24"  # two of a micro-batch of 2 x 16 tokens, and no whole sample
FLOAT8 = ["precision.emulate=true", "model.vocab_pad_multiple=16"]
ON_TWO: dict[str, dict[str, Any]] = {}


def _add(name: str, strategy: str, *more: str, precision: str = "bf16-mixed", model: str = "gpt2") -> None:
    made = case(model, strategy=STRATEGIES[strategy], precision=precision, accumulate=2, world_size=2)
    ON_TWO[name] = made | {"overrides": [*made["overrides"], *more]}


IN_CHUNKS = ["fsdp", "ZeRO-3", *(["ddp", "hsdp", "ZeRO-1", "ZeRO-2, offload"] if IS_LONG else [])]
for _strategy in IN_CHUNKS:
    _add(f"{_strategy}, chunks", _strategy, CHUNKS)
    _add(f"{_strategy}, all logits", _strategy, "loss_chunk_tokens=null")
_add("ddp, all logits", "ddp", "loss_chunk_tokens=null")
_add("16-mixed, chunks", "fsdp", CHUNKS, precision="16-mixed")
_add("16-mixed, all logits", "fsdp", "loss_chunk_tokens=null", precision="16-mixed")
_add("32-true, chunks", "ddp", CHUNKS, precision="32-true")
_add("32-true, all logits", "ddp", "loss_chunk_tokens=null", precision="32-true")
_BUDGET = ["activation_checkpoint=memory_budget", "activation_checkpoint.memory_budget=0.3"]
COMPILED = ["fsdp", *(["ZeRO-3", "ddp", "ZeRO-1", "ZeRO-2"] if IS_LONG else [])]
for _strategy in COMPILED:
    _add(f"{_strategy}, eager", _strategy, precision="32-true")
    _add(f"{_strategy}, compiled", _strategy, "compile=true", precision="32-true")
    if IS_LONG:
        _add(f"{_strategy}, memory budget", _strategy, "compile=true", *_BUDGET, precision="32-true")
_UNTIED = ["model.tie_embeddings=false", "model.vocab_size=512"]  # an embedding larger than a block
_add("untied, fsdp", "fsdp", *_UNTIED, model="llama")
_add("untied, ddp", "ddp", *_UNTIED, model="llama")
_add("kept gathered", "fsdp", "strategy.reshard_after_forward=false", "loss_chunk_tokens=null")
_add("reduced in bfloat16", "fsdp", "strategy.reduce_dtype=bfloat16", "loss_chunk_tokens=null")
for _scaling in ("tensorwise", "rowwise"):
    for _strategy in ("ddp", "fsdp"):
        _add(f"{_scaling}, {_strategy}", _strategy, *FLOAT8, f"precision.scaling={_scaling}", precision="fp8-mixed")


GATHERED = [("bf16-mixed", "ZeRO-3"), ("16-mixed", "ZeRO-3, offload")]
GATHERED += [("bf16-mixed", "ZeRO-3, offload"), ("16-mixed", "ZeRO-3")] if IS_LONG else []
for _precision, _strategy in GATHERED:
    _add(f"{_precision}, {_strategy}", _strategy, precision=_precision)
    _add(f"{_precision}, {_strategy}, float32 gathered", _strategy, precision=_precision)
    ON_TWO[f"{_precision}, {_strategy}, float32 gathered"]["gathers_in_float32"] = True


@pytest.fixture
def on_two(rows: Any) -> Any:
    """Return the rows of a case by name; all run in one process group of two ranks."""
    return lambda name: rows("speed options", ON_TWO, name, world_size=2)


@pytest.mark.parametrize("name", [*IN_CHUNKS, "16-mixed"])
def test_a_loss_in_chunks_is_the_loss_of_all_logits(name: str, on_two: Any) -> None:
    # bfloat16 and float16: the head's gradient is rounded for each chunk, not once; a run differs from itself by 2e-5
    # when only the order of its sums changes. Norms: with all logits they are 1.1e-3 off those of float32 on a Zen 2,
    # in chunks 0.7e-3
    difference = largest_difference(on_two(f"{name}, chunks"), on_two(f"{name}, all logits"))
    assert difference["train/loss"] < 5e-5
    assert difference["grad/norm"] < 2e-3


def test_a_loss_in_chunks_is_that_of_all_logits_to_float32s_last_digits(on_two: Any) -> None:
    difference = largest_difference(on_two("32-true, chunks"), on_two("32-true, all logits"))
    assert difference["train/loss"] < 1e-6  # sums in another order: measured 1.2e-7
    assert difference["grad/norm"] < 1e-6  # likewise 3.2e-7


@pytest.mark.parametrize("name", ["compiled", *(["memory budget"] if IS_LONG else [])])
@pytest.mark.parametrize("strategy", COMPILED)
def test_compiled_blocks_have_the_numbers_of_eager_ones(strategy: str, name: str, on_two: Any) -> None:
    # fused kernels round the same formulas in another order
    difference = largest_difference(on_two(f"{strategy}, {name}"), on_two(f"{strategy}, eager"))
    assert difference["train/loss"] < 1e-5
    assert difference["grad/norm"] < 1e-5


def test_an_untied_head_and_embedding_have_groups_of_their_own_and_the_numbers_of_ddp(on_two: Any) -> None:
    difference = largest_difference(on_two("untied, fsdp"), on_two("untied, ddp"))
    assert difference["train/loss"] < 3e-5
    assert difference["grad/norm"] < 1e-3


def test_weights_that_stay_gathered_change_no_bit(on_two: Any) -> None:
    difference = largest_difference(on_two("kept gathered"), on_two("fsdp, all logits"))
    assert difference == {"train/loss": 0.0, "grad/norm": 0.0}


@pytest.mark.parametrize(("precision", "strategy"), GATHERED)
def test_weights_gathered_in_the_compute_dtype_change_no_bit(precision: str, strategy: str, on_two: Any) -> None:
    rows, others = (on_two(f"{precision}, {strategy}{more}") for more in ("", ", float32 gathered"))
    assert largest_difference(rows, others) == {"train/loss": 0.0, "grad/norm": 0.0}
    assert rows[-1]["val/loss"] == others[-1]["val/loss"]


def test_gradients_reduced_in_bfloat16_differ_by_their_rounding(on_two: Any) -> None:
    difference = largest_difference(on_two("reduced in bfloat16"), on_two("fsdp, all logits"))
    assert 0.0 < difference["grad/norm"] < 2e-3  # bfloat16 rounds by up to 2**-9, in either direction
    assert difference["train/loss"] < 1e-3


def test_float8_on_shards_is_float8_on_replicas(on_two: Any) -> None:
    # one scale a tensor: gathered in float8, rounded once, as where each rank has the whole matrix
    assert largest_difference(on_two("tensorwise, fsdp"), on_two("tensorwise, ddp"))["train/loss"] < 3e-5
    # one scale a row: gathered in bfloat16, so rounded twice
    difference = largest_difference(on_two("rowwise, fsdp"), on_two("rowwise, ddp"))["train/loss"]
    assert 0.0 < difference < 3e-3


def test_float8_trains_as_bfloat16_does_to_its_rounding(on_two: Any) -> None:
    for scaling in ("tensorwise", "rowwise"):
        difference = largest_difference(on_two(f"{scaling}, ddp"), on_two("ddp, all logits"))
        assert 1e-6 < difference["train/loss"] < 1e-2, scaling  # float8 e4m3 rounds by up to 2**-4
