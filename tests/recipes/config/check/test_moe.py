"""What a model with experts cannot be combined with: each mistake is one sentence, and its fix composes."""

import pytest

from recipes.config import compose_and_check

_TWO = "trainer.accelerator=cpu trainer.devices=2"
_TERMS = "+model.load_balance_loss=0.01"

# what is typed -> the mistake, and its fix
MISTAKES = {
    "adapter=lora": (
        "adapter=lora with experts: an adapter stands beside linear layers, and experts are none; type adapter=none",
        "adapter=none",
    ),
    "precision=fp8-mixed precision.emulate=true": (
        "precision=fp8-mixed with experts: products of experts are not computed in float8; type precision=bf16-mixed",
        "precision=bf16-mixed",
    ),
    "optimizer=muon": (
        "optimizer=muon with experts: it would take the stacked matrices of all experts for one; type optimizer=adamw",
        "optimizer=adamw",
    ),
    "model.num_experts_per_token=9": (
        "model.num_experts_per_token=9: there are model.num_experts=8; type model.num_experts_per_token=8",
        "model.num_experts_per_token=8",
    ),
    f"strategy=fsdp {_TWO} tensor_parallel_size=2": (
        "tensor_parallel_size=2 with experts: experts are not divided with the rest of a block;"
        " type tensor_parallel_size=1",
        "tensor_parallel_size=1",
    ),
    f"strategy=fsdp {_TWO} pipeline_parallel_size=2 micro_batch_size=4": (
        "pipeline_parallel_size=2 with experts: experts are not divided with the rest of a block;"
        " type pipeline_parallel_size=1",
        "pipeline_parallel_size=1",
    ),
    f"strategy=ddp {_TWO} context_parallel_size=2 {_TERMS}": (
        "context_parallel_size=2 model.load_balance_loss=0.01: the terms of a sequence need all of its tokens, of which"
        " a rank has a part; type model.load_balance_loss=0 model.balance_rate=0.001",
        "model.load_balance_loss=0",
    ),
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_is_one_sentence_and_its_fix_composes(typed: str) -> None:
    mistake, fix = MISTAKES[typed]
    _, mistakes = compose_and_check(["model=moe_nano", *typed.split()])
    assert [str(found) for found in mistakes] == [mistake]
    fixed = {word.partition("=")[0].lstrip("+"): word for word in typed.split()}
    fixed |= {word.partition("=")[0]: f"+{word}" if "load_balance" in word else word for word in fix.split()}
    fixed.pop("precision.emulate", None)
    _, mistakes = compose_and_check(["model=moe_nano", *fixed.values()])
    assert not mistakes


def test_divided_sequences_work_with_a_bias_and_models_without_experts_with_all_of_it() -> None:
    assert not compose_and_check(["model=moe_nano", "strategy=ddp", *_TWO.split(), "context_parallel_size=2"])[1]
    assert not compose_and_check(["model=llama_nano", "optimizer=muon"])[1]
