"""What a model with experts cannot be combined with: each mistake is one sentence, and its fix composes."""

import pytest

from recipes.config import compose_and_check

_TWO = "trainer.accelerator=cpu trainer.devices=2"
_FOUR = "trainer.accelerator=cpu trainer.devices=4"
_TERMS = "+model.router_aux_loss_coef=0.01"

# what is typed -> the mistake, and its fix
MISTAKES = {
    "adapter=lora": (
        "adapter=lora with experts: an adapter attaches to linear layers, and experts are not linear layers;"
        " type adapter=none",
        "adapter=none",
    ),
    "precision=fp8-mixed precision.emulate=true": (
        "precision=fp8-mixed with experts: products of experts are not computed in float8; type precision=bf16-mixed",
        "precision=bf16-mixed",
    ),
    "optimizer=muon": (
        "optimizer=muon with experts: it would treat the stacked matrices of all experts as one; type optimizer=adamw",
        "optimizer=adamw",
    ),
    "model.num_experts_per_tok=9": (
        "model.num_experts_per_tok=9: there are model.num_experts=8; type model.num_experts_per_tok=8",
        "model.num_experts_per_tok=8",
    ),
    f"strategy=fsdp {_TWO} tensor_parallel_size=2": (
        "tensor_parallel_size=2 with experts: experts are not sharded with the rest of a block;"
        " type tensor_parallel_size=1",
        "tensor_parallel_size=1",
    ),
    f"strategy=ddp {_TWO} expert_parallel_size=2": (
        "expert_parallel_size=2 strategy=ddp: expert parallelism needs strategy=fsdp or hsdp;"
        " type strategy=fsdp, which shards over the other ranks, or expert_parallel_size=1",
        "strategy=fsdp",
    ),
    "expert_parallel_size=2": (
        "expert_parallel_size=2 strategy=single: expert parallelism needs strategy=fsdp or hsdp;"
        " type strategy=fsdp, which shards over the other ranks, or expert_parallel_size=1",
        "expert_parallel_size=1",
    ),
    f"strategy=fsdp {_FOUR} expert_parallel_size=3": (
        "expert_parallel_size=3: 4 ranks are not divisible by 3;"
        " type expert_parallel_size=2, or another trainer.devices",
        "expert_parallel_size=2",
    ),
    f"strategy=hsdp {_FOUR} data_parallel_shard=2 expert_parallel_size=4": (
        "expert_parallel_size=4: 2 ranks are not divisible by 4;"
        " type expert_parallel_size=2, or another trainer.devices",
        "expert_parallel_size=2",
    ),
    f"strategy=fsdp {_FOUR} expert_parallel_size=4 model.num_experts=6": (
        "expert_parallel_size=4: model.num_experts=6 is not divisible by 4 ranks; type expert_parallel_size=2",
        "expert_parallel_size=2",
    ),
    "strategy=fsdp trainer.accelerator=cpu trainer.devices=6 expert_parallel_size=2 micro_batch_size=1"
    " global_batch_size=12 model.moe_intermediate_size=256": (
        "model.moe_intermediate_size=256 expert_parallel_size=2: 3 ranks share the same experts, and the rows of their"
        " matrices are not divisible by 3; type model.moe_intermediate_size=264",
        "model.moe_intermediate_size=264",
    ),
    f"strategy=fsdp {_TWO} expert_parallel_size=2 optimizer=adamw_8bit": (
        "optimizer=adamw_8bit expert_parallel_size=2: it needs unsharded matrices;"
        " type optimizer=adamw, or expert_parallel_size=1",
        "optimizer=adamw",
    ),
    f"strategy=fsdp {_TWO} expert_parallel_size=2 model=llama_nano": (
        "expert_parallel_size=2 model._target_=recipes.model.llama.Llama: it has no experts;"
        " type expert_parallel_size=1, or model=mixtral_nano or another one with experts",
        "expert_parallel_size=1",
    ),
    f"strategy=ddp {_TWO} context_parallel_size=2 {_TERMS}": (
        "context_parallel_size=2 model.router_aux_loss_coef=0.01: the loss terms of a sequence need all of its"
        " tokens, and each rank has only a part of them; type model.router_aux_loss_coef=0 model.balance_rate=0.001",
        "model.router_aux_loss_coef=0",
    ),
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_is_one_sentence_and_its_fix_composes(typed: str) -> None:
    mistake, fix = MISTAKES[typed]
    base = [] if "model=" in typed else ["model=mixtral_nano"]
    _, mistakes = compose_and_check([*base, *typed.split()])
    assert [str(found) for found in mistakes] == [mistake]
    fixed = {word.partition("=")[0].lstrip("+"): word for word in typed.split()}
    fixed |= {word.partition("=")[0]: f"+{word}" if "load_balance" in word else word for word in fix.split()}
    fixed.pop("precision.emulate", None)
    _, mistakes = compose_and_check([*base, *fixed.values()])
    assert not mistakes


def test_divided_sequences_work_with_a_bias_and_models_without_experts_with_all_of_it() -> None:
    assert not compose_and_check(["model=mixtral_nano", "strategy=ddp", *_TWO.split(), "context_parallel_size=2"])[1]
    assert not compose_and_check(["model=llama_nano", "optimizer=muon"])[1]


@pytest.mark.parametrize(
    "typed",
    [
        *("strategy=fsdp", "strategy=hsdp data_parallel_shard=2", "strategy=fsdp context_parallel_size=2"),
        *("optimizer=lion", f"pipeline_parallel_size=2 micro_batch_size=2 {_TERMS}"),
    ],
)
def test_divided_experts_work_with_other_ways_to_divide(typed: str) -> None:
    typed = typed if "strategy" in typed else f"strategy=fsdp {typed}"
    overrides = ["model=mixtral_nano", *_FOUR.split(), "expert_parallel_size=2", *typed.split()]
    assert [str(mistake) for mistake in compose_and_check(overrides)[1]] == []
