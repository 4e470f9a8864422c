"""Mistakes about pipelines: each is one sentence, and each fix that it names composes."""

import pytest

from recipes.config import compose_and_check

_TWO = "strategy=fsdp trainer.accelerator=cpu trainer.devices=2 global_batch_size=16 pipeline_parallel_size=2"
_FOUR_LAYERS = "model.num_layers=4"
_INTERLEAVED, _V = "pipeline_schedule=Interleaved1F1B", "pipeline_schedule=ZBVZeroBubble"

# what is typed -> the mistake, and each fix of it
MISTAKES: dict[str, tuple[str, list[str]]] = {
    f"{_TWO} micro_batch_size=16": (
        "pipeline_parallel_size=2 pipeline_schedule=1F1B: it needs at least 2 micro-batches per rank, but has 1;"
        " type micro_batch_size=8",
        ["micro_batch_size=8"],
    ),
    f"{_TWO} {_INTERLEAVED} {_FOUR_LAYERS} micro_batch_size=16": (
        "pipeline_parallel_size=2 pipeline_schedule=Interleaved1F1B: it needs at least 2 micro-batches per rank, or"
        " a multiple of them, but has 1; type micro_batch_size=8",
        ["micro_batch_size=8"],
    ),
    f"{_TWO} micro_batch_size=4 model.num_layers=1": (
        "pipeline_parallel_size=2 pipeline_schedule=1F1B model.num_layers=1: there are 2 stages, and each needs a"
        " layer; type pipeline_parallel_size=1, or model.num_layers=2",
        ["pipeline_parallel_size=1", "model.num_layers=2"],
    ),
    f"{_TWO} {_V} micro_batch_size=4 model.num_layers=3": (
        "pipeline_parallel_size=2 pipeline_schedule=ZBVZeroBubble model.num_layers=3: there are 4 stages, and each"
        " needs a layer; type pipeline_parallel_size=1, or model.num_layers=4",
        ["pipeline_parallel_size=1", "model.num_layers=4"],
    ),
    f"{_TWO} {_V} {_FOUR_LAYERS} micro_batch_size=4 compile=true": (
        "pipeline_schedule=ZBVZeroBubble compile=true: it splits the backward pass of a layer in two, which a compiled"
        " layer does not support (torch 2.13); type compile=false, or pipeline_schedule=Interleaved1F1B",
        ["compile=false", _INTERLEAVED],
    ),
    f"{_TWO} {_V} {_FOUR_LAYERS} micro_batch_size=4 activation_checkpoint=selective": (
        "pipeline_schedule=ZBVZeroBubble activation_checkpoint.save_ops=products: it splits the backward pass of a"
        " layer in two, and torch (2.13) recomputes from saved tensors only once; type activation_checkpoint=full, or"
        " pipeline_schedule=Interleaved1F1B",
        ["activation_checkpoint=full", _INTERLEAVED],
    ),
    f"{_TWO} micro_batch_size=4 strategy.gather_for_generation=per_call": (
        "strategy.gather_for_generation=per_call pipeline_parallel_size=2: each pipeline stage generates with its own"
        " layers, and gathers none of the others; type the same command without it",
        [],
    ),
    f"{_TWO} micro_batch_size=4 mode=noise_scale": (
        "pipeline_parallel_size=2 mode=noise_scale: it compares the gradients of micro-batches, which a pipeline adds"
        " up; type pipeline_parallel_size=1",
        ["pipeline_parallel_size=1"],
    ),
    f"{_TWO} micro_batch_size=4 adapter=lora": (
        "pipeline_parallel_size=2 adapter=lora: an adapter attaches to all layers, and each rank has only some of them;"
        " type pipeline_parallel_size=1, or adapter=none",
        ["pipeline_parallel_size=1", "adapter=none"],
    ),
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_is_one_sentence_whose_fixes_compose(typed: str) -> None:
    message, fixes = MISTAKES[typed]
    assert [str(mistake) for mistake in compose_and_check(typed.split())[1]] == [message]
    for fix in fixes:
        replaced = {text.partition("=")[0]: text for text in [*typed.split(), fix]}
        if fix == "pipeline_parallel_size=1":
            replaced.pop("pipeline_schedule", None)
        assert [str(left) for left in compose_and_check([*replaced.values()])[1]] == [], fix


@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_v_takes_any_number_of_micro_batches(number: int) -> None:
    typed = f"{_TWO} {_V} {_FOUR_LAYERS} micro_batch_size=4 global_batch_size={4 * number}"
    overrides = {text.partition("=")[0]: text for text in typed.split()}
    assert [str(left) for left in compose_and_check([*overrides.values()])[1]] == []
