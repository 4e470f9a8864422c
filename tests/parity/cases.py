"""The experiment that every strategy must reproduce: steps with uneven masks, clipping, AdamW and warmup."""

import math
import os
from typing import Any

from transformed_images import TRANSFORM

IS_LONG = "LONG_TESTS" in os.environ  # set by `make test-long`
NUM_STEPS = 20 if IS_LONG else 8
GLOBAL_BATCH_SIZE = 16

COMMON = [
    f"trainer.max_steps={NUM_STEPS}",
    f"global_batch_size={GLOBAL_BATCH_SIZE}",
    "trainer.accelerator=cpu",
    "trainer.gradient_clip_val=0.5",
    "warmup_steps=5",
    "log_every=1",
    f"eval_every={NUM_STEPS}",
    "eval_samples=49",  # out of 50: odd, so that one of two ranks is padded
    "save_every=null",
    "seed=7",
    "callbacks=[grad_norm,loss_scale]",
]
TOKENS = {"_target_": "support.MaskedTokens", "num_samples": 50, "seq_len": 16, "vocab_size": 64}
IMAGES = {"_target_": "support.MaskedImages", "num_samples": 50}
PLAIN_IMAGES = {
    "_target_": "recipes.data.random_images.RandomImages",
    "num_classes": 10,
    "in_channels": 1,
    "image_size": 8,
    "num_samples": 37,  # eight steps are three epochs and a half
    "random_crop_padding": 0,
    "random_horizontal_flip": False,
    "targets": "classes",
}
LARGER_IMAGES = {"_target_": "support.MaskedImages", "num_samples": 50, "image_size": 32}
DRAWN_IMAGES = PLAIN_IMAGES | {"random_crop_padding": 2, "random_horizontal_flip": True}
MIXED_IMAGES = {
    "_target_": "transformed_images.TransformedImages",
    "num_samples": 37,
    "transform": TRANSFORM | {"policy": "trivialaugment", "erase": 0.5, "mixup": 0.8, "cutmix": 1.0, "mix_epochs": 2.0},
}
# a batch norm would make the micro-batch part of the experiment
SMALL_CLASSIFIER = ["model=resnet18", "model._target_=small_models.SmallClassifier", "data=digits", "optimizer.lr=1e-2"]
_OF_TIMM = ["model=timm", "data=digits", "model.in_channels=1", "model.num_classes=10", "optimizer.lr=1e-3"]
DECODER = [
    "data=random_tokens",
    "model.vocab_size=64",
    "model.max_seq_len=16",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.hidden_size=32",
    "optimizer.lr=1e-3",
]
MODELS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "gpt2": (
        [*DECODER, "model=gpt2_nano"],
        TOKENS,
    ),
    "llama": (
        [*DECODER, "model=llama_nano", "model.num_kv_heads=1", "model.ffn_hidden_size=64"],
        TOKENS,
    ),
    "experts": (
        [
            *DECODER,
            "model=mixtral_nano",
            "model.num_kv_heads=1",
            "model.moe_intermediate_size=32",
            "model.num_experts=4",
        ],
        TOKENS,
    ),
    "two towers": ([*DECODER, "model=gpt2_nano", "model._target_=small_models.TwoTowers"], TOKENS),
    "resnet18": (["model=resnet18", "data=digits", "optimizer.lr=1e-3"], IMAGES),
    "vit": (
        [
            *_OF_TIMM,
            "model.name=vit_tiny_patch16_224",
            "model.image_size=32",
            "model.arguments={depth: 2, patch_size: 8, embed_dim: 48, num_heads: 3}",
        ],
        LARGER_IMAGES,
    ),
    "convnext": (
        [*_OF_TIMM, "model.name=convnext_atto", "model.arguments={depths: [1, 1, 2, 1], dims: [8, 16, 32, 64]}"],
        LARGER_IMAGES,
    ),
    "sync resnet": (
        [
            *_OF_TIMM,
            "model.name=resnet18",
            "model.norm=sync",
            # larger steps let another order of summation grow beyond 1e-5 in eight of them, as kinks do for resnet18
            "optimizer.lr=1e-4",
            "model.arguments={channels: [8, 16, 32, 64], act_layer: gelu}",
        ],
        LARGER_IMAGES,
    ),
    "plain images": (SMALL_CLASSIFIER, PLAIN_IMAGES),
    "drawn images": (SMALL_CLASSIFIER, DRAWN_IMAGES),
    "mixed images": ([*SMALL_CLASSIFIER, "data=random_images", "model.in_channels=3"], MIXED_IMAGES),
}


def shortened(cases: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return the named cases, which cover every code path once; all of them in `make test-long`."""
    return cases if IS_LONG else {name: cases[name] for name in names}


def case(model: str, *, strategy: list[str], precision: str, accumulate: int, world_size: int) -> dict[str, Any]:
    """Return a variant of the experiment: its overrides, and the data node that replaces the composed one."""
    overrides, data = MODELS[model]
    micro_batch_size = GLOBAL_BATCH_SIZE // (accumulate * count_data_ranks(strategy, world_size))
    return {
        "overrides": [
            *overrides,
            *COMMON,
            *strategy,
            f"precision={precision}",
            f"micro_batch_size={micro_batch_size}",
            f"trainer.devices={world_size}",
        ],
        "data": data,
    }


def count_data_ranks(strategy: list[str], world_size: int) -> int:
    """Return the number of ranks with different samples."""
    typed = dict(override.split("=", 1) for override in strategy)
    sizes = (int(typed.get(f"{name}_parallel_size", 1)) for name in ("tensor", "context", "pipeline"))
    return world_size // math.prod(sizes)


STRATEGIES: dict[str, list[str]] = {
    "single": ["strategy=single"],
    "ddp": ["strategy=ddp"],
    "fsdp": ["strategy=fsdp"],
    "fsdp, gradient sync per step": ["strategy=fsdp", "strategy.gradient_sync=per_step"],
    "fsdp, cpu offload": ["strategy=fsdp", "strategy.cpu_offload=true"],
    "hsdp": ["strategy=hsdp", "data_parallel_shard=2"],
    "ZeRO-1": ["strategy=deepspeed_stage_1"],
    "ZeRO-1, offload": ["strategy=deepspeed_stage_1", "strategy.offload_optimizer=cpu"],
    "ZeRO-2": ["strategy=deepspeed_stage_2"],
    "ZeRO-2, offload": ["strategy=deepspeed_stage_2_offload"],
    "ZeRO-3": ["strategy=deepspeed_stage_3"],
    "ZeRO-3, offload": ["strategy=deepspeed_stage_3_offload"],
}
# tensor, context and pipeline parallelism, under the engines that support it
_FSDP, _PP = "strategy=fsdp", "pipeline_parallel_size=2"
MESHES: dict[str, list[str]] = {
    "tp2": [_FSDP, "tensor_parallel_size=2"],
    "tp2, whole sequence": [_FSDP, "tensor_parallel_size=2", "sequence_parallel=false"],
    "tp2, all logits": [_FSDP, "tensor_parallel_size=2", "loss_chunk_tokens=null"],
    "tp2, cpu offload": [_FSDP, "tensor_parallel_size=2", "strategy.cpu_offload=true"],
    "cp2, ddp": ["strategy=ddp", "context_parallel_size=2"],
    "cp2, fsdp": [_FSDP, "context_parallel_size=2"],
    "cp2, ZeRO-2": ["strategy=deepspeed_stage_2", "context_parallel_size=2"],
    "cp2, ZeRO-3": ["strategy=deepspeed_stage_3", "context_parallel_size=2"],
    "pp2": [_FSDP, _PP],
    "pp2, interleaved": [_FSDP, _PP, "pipeline_schedule=Interleaved1F1B"],
    "pp2, zero bubble": [_FSDP, _PP, "pipeline_schedule=ZBVZeroBubble"],
    "ep2": [_FSDP, "expert_parallel_size=2"],
    "ep4": [_FSDP, "expert_parallel_size=4"],
    "ep2, two replicas": [_FSDP, "expert_parallel_size=2", "data_parallel_replicate=2"],
    "ep4, cp2": [_FSDP, "expert_parallel_size=4", "context_parallel_size=2"],
    "pp2, ep2": [_FSDP, _PP, "expert_parallel_size=2"],
    "pp2, ep2, zero bubble": [_FSDP, _PP, "expert_parallel_size=2", "pipeline_schedule=ZBVZeroBubble"],
    "tp2, cp2": [_FSDP, "tensor_parallel_size=2", "context_parallel_size=2"],
    "tp2, two replicas": [_FSDP, "tensor_parallel_size=2", "data_parallel_replicate=2"],
    "pp2, tp2": [_FSDP, _PP, "tensor_parallel_size=2"],
    "pp2, cp2": [_FSDP, _PP, "context_parallel_size=2"],
}
ENGINES = STRATEGIES | MESHES


PACKED_DATA = {
    "_target_": "recipes.data.synthetic_tasks.SyntheticTasks",
    "tasks": ["rev", "sort"],
    "num_examples": 400,
    "mixed_answers": False,
    "shuffle_answers": False,
    "chat_template": "auto",
    "train_on": "answers",
    "packing": True,
    "val_fraction": 0.2,
    "tokenizer": {"_target_": "recipes.tokenizer.bytes.Bytes"},
    "seq_len": 48,
    "vocab_size": 257,
}  # plus a cache_dir
_PACKED = [
    *("data=synthetic_tasks", "tokenizer=bytes"),
    *("model.vocab_size=257", "model.max_seq_len=48", "optimizer.lr=5e-3", "eval_samples=null"),
    "callbacks=[grad_norm,loss_scale,generation_eval]",
    "callbacks.generation_eval.num_samples=21",  # odd, so that one of two ranks has fewer
    "callbacks.generation_eval.reward={_target_: support.number_of_text, _partial_: true}",
]


def packed_case(
    strategy: str, *more: str, world_size: int, accumulate: int = 2, model: str = "gpt2", cache_dir: str | None = None
) -> dict[str, Any]:
    """Return the experiment on packed examples, including answers to validation questions."""
    made = case(model, strategy=ENGINES[strategy], precision="32-true", accumulate=accumulate, world_size=world_size)
    kept = [override for override in made["overrides"] if not override.startswith("data=")]
    return made | {"overrides": [*kept, *_PACKED, *more], "data": PACKED_DATA | {"cache_dir": cache_dir}}


MIXED_DATA = {
    "_target_": "recipes.data.mixture.source.Mixture",
    "sources": {
        "letters": PACKED_DATA,
        "noise": {
            "_target_": "recipes.data.random_tokens.RandomTokens",
            "vocab_size": 257,
            "seq_len": 48,
            "num_samples": 70,
        },
    },
    "weights": {"letters": 0.7, "noise": 0.3},
    "stages": [{"from": 51, "weights": {"letters": 0.4, "noise": 0.6}}],  # within a step
    "max_epochs": None,
    "seq_len": 48,
}


def mixed_case(strategy: str, *, world_size: int, accumulate: int = 2, more: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the experiment on a mixture of packed examples and noise, with a second validation set."""
    other = ("+data@eval_data.other=random_tokens", "+eval_data.other.seed=3")
    made = packed_case(strategy, *other, *more, world_size=world_size, accumulate=accumulate)
    return made | {"data": MIXED_DATA}


def with_cache_dir(data: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return a data node whose texts are cached in a folder."""
    if "sources" in data:
        return data | {"sources": {name: with_cache_dir(node, folder) for name, node in data["sources"].items()}}
    return data | {"cache_dir": folder} if "tokenizer" in data else data


def largest_difference(rows: list[dict[str, float]], reference: list[dict[str, float]]) -> dict[str, float]:
    """Return the largest relative differences of loss and norm over all steps."""
    assert len(rows) == len(reference), f"{len(rows)} rows != {len(reference)}"
    return {
        name: max(abs(row[name] - other[name]) / abs(other[name]) for row, other in zip(rows, reference, strict=True))
        for name in ("train/loss", "grad/norm")
    }


def memory_case(name: str, *, world_size: int, num_layers: int = 4) -> dict[str, Any]:
    """Return three steps on very little data, so that the train state dominates memory: 31M parameters in 4 layers."""
    size = {
        "model.vocab_size": 4096,
        "model.hidden_size": 768,
        "model.num_heads": 4,
        "model.num_layers": num_layers,
    }
    smaller = [override for override in DECODER if override.partition("=")[0] not in size]
    return {
        "overrides": [
            *smaller,
            *(f"{key}={value}" for key, value in size.items()),
            *COMMON,
            "model=gpt2_nano",
            "trainer.max_steps=3",
            "global_batch_size=4",
            "micro_batch_size=1",
            "eval_every=3",
            f"trainer.devices={world_size}",
            *STRATEGIES[name],
        ],
        "data": TOKENS,
        "count": True,
    }


def overflow_case(name: str, *more: str, world_size: int, model: str = "gpt2") -> dict[str, Any]:
    """Return six float16 steps; in the third step, the last rank's gradients overflow."""
    base = case(model, strategy=ENGINES[name], precision="16-mixed", accumulate=2, world_size=world_size)
    overrides = [override for override in base["overrides"] if not override.startswith("save_every")]
    overrides += ["trainer.max_steps=6", "eval_every=6", "save_every=4", *more]
    return base | {"overrides": overrides, "overflow": {"step": 2, "rank": world_size - 1}}
