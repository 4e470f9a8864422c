"""Mistakes about the device mesh: each is one sentence, and each fix that it names composes."""

from typing import Any

import pytest

from recipes.config import compose_and_check

_FOUR = "strategy=fsdp trainer.accelerator=cpu trainer.devices=4"
_TP, _CP = f"{_FOUR} tensor_parallel_size=2", f"{_FOUR} context_parallel_size=2"
_PP = f"{_FOUR} pipeline_parallel_size=2 micro_batch_size=6"
_COPIES = "only strategy=fsdp and hsdp set the number of replicas and of ranks per replica"
_MODELS = "model=gpt2, model=llama_160m or another size of them"
_WHOLE = "it needs unsharded matrices; type optimizer=adamw, or tensor_parallel_size=1"
_IMAGES = "model=resnet18 data=digits task=classification"
_WIDE = "model=llama_nano model.num_heads=6 model.num_kv_heads=6"

# what is typed -> the mistake, and each fix of it
MISTAKES: dict[str, tuple[str, list[str]]] = {
    "strategy=ddp trainer.accelerator=cpu trainer.devices=4 tensor_parallel_size=2": (
        "tensor_parallel_size=2 strategy=ddp: tensor parallelism needs strategy=fsdp or hsdp;"
        " type strategy=fsdp, which shards over the other ranks, or tensor_parallel_size=1",
        ["strategy=fsdp", "tensor_parallel_size=1"],
    ),
    "strategy=deepspeed_stage_2 trainer.accelerator=cpu trainer.devices=4 tensor_parallel_size=2": (
        "tensor_parallel_size=2 strategy=deepspeed_stage_2: tensor parallelism needs strategy=fsdp or hsdp;"
        " type strategy=fsdp, which shards over the other ranks, or tensor_parallel_size=1",
        ["strategy=fsdp", "tensor_parallel_size=1"],
    ),
    f"{_FOUR} tensor_parallel_size=3": (
        "tensor_parallel_size=3: 4 ranks are not divisible by 3;"
        " type tensor_parallel_size=2, or another trainer.devices",
        ["tensor_parallel_size=2"],
    ),
    f"{_FOUR} context_parallel_size=8": (
        "context_parallel_size=8: 4 ranks are not divisible by 8;"
        " type context_parallel_size=4, or another trainer.devices",
        ["context_parallel_size=4"],
    ),
    f"{_FOUR} tensor_parallel_size=2 context_parallel_size=4": (
        "tensor_parallel_size=2 context_parallel_size=4: 4 ranks are not divisible by 8;"
        " type tensor_parallel_size=2 context_parallel_size=2, or another trainer.devices",
        ["tensor_parallel_size=2 context_parallel_size=2"],
    ),
    "context_parallel_size=2": (
        "context_parallel_size=2: 1 rank is not divisible by 2;"
        " type context_parallel_size=1, or another trainer.devices",
        ["context_parallel_size=1"],
    ),
    f"{_TP} model.num_heads=3": (
        "tensor_parallel_size=2: model.num_heads=3 is not divisible by 2 ranks; type tensor_parallel_size=1",
        ["tensor_parallel_size=1"],
    ),
    f"{_TP} model=llama_nano model.num_heads=6 model.num_kv_heads=1": (
        "tensor_parallel_size=2: model.num_kv_heads=1 is not divisible by 2 ranks; type tensor_parallel_size=1",
        ["tensor_parallel_size=1"],
    ),
    f"{_TP} {_WIDE} model.ffn_hidden_size=511": (
        "tensor_parallel_size=2: model.ffn_hidden_size=511 is not divisible by 2 ranks; type tensor_parallel_size=1",
        ["tensor_parallel_size=1"],
    ),
    f"{_TP} model.vocab_pad_multiple=1 model.vocab_size=2049": (
        "tensor_parallel_size=2: the vocabulary of 2049 rows is not divisible by 2 ranks;"
        " type model.vocab_pad_multiple=2",
        ["model.vocab_pad_multiple=2"],
    ),
    f"{_TP} seq_len=127": (
        "seq_len=127 tensor_parallel_size=2 sequence_parallel=true: 127 tokens are not divisible by 2 ranks;"
        " type seq_len=126",
        ["seq_len=126"],
    ),
    f"{_CP} seq_len=127": (
        "seq_len=127 context_parallel_size=2: 127 tokens are not divisible by 2 ranks; type seq_len=126",
        ["seq_len=126"],
    ),
    f"{_TP} context_parallel_size=2 seq_len=127": (
        "seq_len=127 context_parallel_size=2 tensor_parallel_size=2 sequence_parallel=true:"
        " 127 tokens are not divisible by 4 ranks; type seq_len=124",
        ["seq_len=124"],
    ),
    f"{_TP} sequence_parallel=false model.dropout=0.1": (
        "tensor_parallel_size=2 sequence_parallel=false model.dropout=0.1: ranks with the same tokens would drop"
        " different activations; type sequence_parallel=true, or model.dropout=0",
        ["sequence_parallel=true", "model.dropout=0"],
    ),
    **{
        f"{_TP} optimizer={option}": (
            f"tensor_parallel_size=2 optimizer={option}: {_WHOLE}",
            ["optimizer=adamw", "tensor_parallel_size=1"],
        )
        for option in ("muon", "adafactor", "adamw_8bit")
    },
    f"{_TP} adapter=lora": (
        "tensor_parallel_size=2 adapter=lora: adapter matrices are not sharded over ranks;"
        " type tensor_parallel_size=1, or adapter=none",
        ["tensor_parallel_size=1", "adapter=none"],
    ),
    f"{_TP} precision=fp8-mixed precision.emulate=true": (
        "tensor_parallel_size=2 precision=fp8-mixed: products of sharded matrices are not computed in float8;"
        " type precision=bf16-mixed, or tensor_parallel_size=1",
        ["precision=bf16-mixed"],
    ),
    f"{_TP} {_IMAGES}": (
        "tensor_parallel_size=2 model._target_=recipes.model.resnet.ResNet18: it does not declare how it is"
        f" sharded over ranks; type tensor_parallel_size=1, or {_MODELS}",
        ["tensor_parallel_size=1", "model=gpt2 data=stdlib_text task=language_modeling"],
    ),
    f"{_CP} {_IMAGES}": (
        "context_parallel_size=2 model._target_=recipes.model.resnet.ResNet18: it does not declare how it is"
        f" sharded over ranks; type context_parallel_size=1, or {_MODELS}",
        ["context_parallel_size=1", "model=llama_160m data=stdlib_text task=language_modeling"],
    ),
    f"{_CP} mode=preflight": (
        "mode=preflight context_parallel_size=2: its checks read the logits of complete sequences, and each rank has"
        " only a part of them or none; type context_parallel_size=1",
        ["context_parallel_size=1"],
    ),
    f"{_PP} mode=preflight": (
        "mode=preflight pipeline_parallel_size=2: its checks read the logits of complete sequences, and each rank has"
        " only a part of them or none; type pipeline_parallel_size=1",
        ["pipeline_parallel_size=1"],
    ),
    "strategy=ddp trainer.accelerator=cpu trainer.devices=4 data_parallel_shard=2": (
        f"data_parallel_shard=2 strategy=ddp: {_COPIES}; type strategy=fsdp, or data_parallel_shard=null",
        ["strategy=fsdp", "data_parallel_shard=null"],
    ),
    "strategy=deepspeed_stage_3 trainer.accelerator=cpu trainer.devices=4 data_parallel_replicate=2"
    " data_parallel_shard=2": (
        f"data_parallel_replicate=2 data_parallel_shard=2 strategy=deepspeed_stage_3: {_COPIES};"
        " type strategy=fsdp, or data_parallel_replicate=null data_parallel_shard=null",
        ["strategy=fsdp", "data_parallel_replicate=null data_parallel_shard=null"],
    ),
    f"{_FOUR} data_parallel_replicate=3": (
        "data_parallel_replicate=3: 4 ranks are not divisible by 3; type data_parallel_replicate=2",
        ["data_parallel_replicate=2"],
    ),
    f"{_FOUR} data_parallel_replicate=8": (
        "data_parallel_replicate=8: 4 ranks are not divisible by 8; type data_parallel_replicate=4",
        ["data_parallel_replicate=4"],
    ),
    f"{_TP} data_parallel_shard=4": (
        "data_parallel_shard=4: 2 ranks are not divisible by 4;"
        " type data_parallel_shard=2 data_parallel_replicate=null",
        ["data_parallel_shard=2 data_parallel_replicate=null"],
    ),
    "strategy=hsdp trainer.accelerator=cpu trainer.devices=4 data_parallel_shard=2 data_parallel_replicate=4": (
        "data_parallel_replicate=4 data_parallel_shard=2: their product is 8, and 4 ranks read samples of their own;"
        " type data_parallel_shard=2 data_parallel_replicate=null",
        ["data_parallel_shard=2 data_parallel_replicate=null"],
    ),
}


def find_mistakes(overrides: list[str]) -> list[Any]:
    """Return the mistakes of a command, of a batch that divides over any of these ranks."""
    return compose_and_check(["global_batch_size=24", *overrides])[1]


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_mistake_is_one_sentence_whose_fixes_compose(typed: str) -> None:
    message, fixes = MISTAKES[typed]
    overrides = typed.split()
    [mistake] = find_mistakes(overrides)
    assert str(mistake) == message
    for fix in fixes:
        assert fix.split()[0] in mistake.fix
        replaced = {text.partition("=")[0] for text in fix.split()} | {"precision.emulate"}
        kept = [text for text in overrides if text.partition("=")[0] not in replaced]
        assert [str(left) for left in find_mistakes([*kept, *fix.split()])] == [], fix


@pytest.mark.parametrize(
    "typed",
    [
        f"{_TP} optimizer=lion",
        f"{_TP} optimizer=sgd",
        f"{_TP} optimizer=schedule_free",
        f"{_TP} optimizer=adam",
        f"{_TP} context_parallel_size=2 {_WIDE}",
        f"{_TP} sequence_parallel=false seq_len=127",
        f"{_CP} optimizer=muon",
        f"{_CP} adapter=lora",
        f"{_CP} model.dropout=0.1",
        f"{_TP} model.dropout=0.1",
        "strategy=ddp trainer.accelerator=cpu trainer.devices=4 context_parallel_size=2",
        "strategy=deepspeed_stage_3 trainer.accelerator=cpu trainer.devices=4 context_parallel_size=4",
        "strategy=hsdp trainer.accelerator=cpu trainer.devices=4 tensor_parallel_size=2 data_parallel_shard=1",
        "strategy=ddp trainer.accelerator=cpu trainer.devices=4 data_parallel_replicate=1",
    ],
)
def test_what_works_is_no_mistake(typed: str) -> None:
    assert [str(mistake) for mistake in find_mistakes(typed.split())] == []


@pytest.mark.parametrize("name", ["tensor_parallel_size", "context_parallel_size"])
@pytest.mark.parametrize("value", ["0", "-2", "null", "two", "1.5"])
def test_a_size_that_is_no_positive_number_is_one_mistake(name: str, value: str) -> None:
    [mistake] = find_mistakes([*_FOUR.split(), f"{name}={value}"])
    assert mistake.setting == f"{name}={value}"
    assert mistake.fix.startswith(f"{name}=<")


def test_a_model_from_huggingface_is_not_divided(tmp_path: Any) -> None:
    from support import needed_by

    overrides = ["model=huggingface", *needed_by("", tmp_path, model="huggingface")]
    for size in ("tensor_parallel_size=2", "context_parallel_size=2"):
        [mistake] = find_mistakes([*_FOUR.split(), *overrides, size])
        assert mistake.reason == "it does not declare how it is sharded over ranks"
    assert find_mistakes([*_FOUR.split(), *overrides]) == []
