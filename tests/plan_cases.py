"""Runs for comparing planned memory with torch's allocated memory, on 1 and 2 ranks."""

from pathlib import Path

from recipes.plan.hardware import Cluster, find_cluster

PEAK_RANKS = Path(__file__).parent / "parity/peak_ranks.py"  # worker that measures the peak

COMMON = [
    "recipe=single_fp32",
    "callbacks=[grad_norm]",
    "logger=none",
    "save_every=null",
    "trainer.max_steps=3",
    "eval_every=3",
    "eval_samples=4",
    "trainer.accelerator=cpu",
    "global_batch_size=8",
]
_TEXT = ["data=random_tokens", "model.vocab_size=2048", "seq_len=128", "model.max_seq_len=128"]
_SMALL = ["model.hidden_size=256", "model.num_heads=4", "model.num_layers=4"]
GPT = ["model=gpt2_nano", *_TEXT, *_SMALL]
LLAMA = ["model=llama_nano", *_TEXT, *_SMALL, "model.num_kv_heads=2", "model.ffn_hidden_size=512"]
EXPERTS = [*LLAMA, "model=mixtral_nano"]
DEEP = [*GPT, "model.num_layers=12", "model.hidden_size=128"]
WIDE = [*GPT, "model.num_layers=2", "model.hidden_size=512"]
RESNET = ["model=resnet18", "data=digits", "metrics=classification", "callbacks=[grad_norm]"]
_IMAGES = ["model=timm", "data=random_images", "metrics=classification", "global_batch_size=4"]
TIMM_RESNET = [*_IMAGES, "model.name=resnet50"]
TIMM_VIT = [*_IMAGES, "model.name=vit_base_patch16_224"]
TIMM_CONVNEXT = [*_IMAGES, "model.name=convnext_tiny"]
FEW_TOKENS = ["seq_len=16", "model.max_seq_len=16", "global_batch_size=1"]  # the optimizer step may be the peak
RECOMPUTE = "activation_checkpoint=full"
SELECTIVE = "activation_checkpoint=selective"
OFFLOAD = ["activation_checkpoint.offload=true", "activation_checkpoint.offload_min_mib=0.1"]

# name -> number of ranks, overrides
CASES: dict[str, tuple[int, list[str]]] = {
    "gpt2": (1, GPT),
    "gpt2, batch 2": (1, [*GPT, "global_batch_size=2"]),
    "gpt2, 64 tokens": (1, [*GPT, "seq_len=64"]),
    "gpt2, 4 micro-batches": (1, [*GPT, "micro_batch_size=2"]),
    "gpt2, recomputed": (1, [*GPT, RECOMPUTE]),
    "gpt2, every second block recomputed": (1, [*GPT, RECOMPUTE, "activation_checkpoint.every_nth_block=2"]),
    "gpt2, selective": (1, [*GPT, SELECTIVE]),
    "gpt2, dropout, every second product kept": (
        1,
        [*GPT, SELECTIVE, "activation_checkpoint.keep_every_nth_product=2", "model.dropout=0.1"],
    ),
    "gpt2, 12 layers, selective": (1, [*DEEP, SELECTIVE]),
    "gpt2, activations offloaded": (1, [*GPT, *OFFLOAD]),
    "gpt2, 12 layers, activations offloaded": (1, [*DEEP, *OFFLOAD]),
    "gpt2, 12 layers, recomputed, inputs offloaded": (1, [*DEEP, RECOMPUTE, *OFFLOAD]),
    "gpt2, 12 layers, selective, offloaded": (1, [*DEEP, SELECTIVE, *OFFLOAD]),
    "gpt2, bf16-mixed": (1, [*GPT, "precision=bf16-mixed"]),
    "gpt2, bf16-mixed, recomputed, 2 micro-batches": (
        1,
        [*GPT, "precision=bf16-mixed", RECOMPUTE, "micro_batch_size=4"],
    ),
    "gpt2, 16-mixed": (1, [*GPT, "precision=16-mixed"]),
    "gpt2, bf16-true": (1, [*GPT, "precision=bf16-true"]),
    "gpt2, dropout": (1, [*GPT, "model.dropout=0.1"]),
    "gpt2, average of the weights": (1, [*GPT, "ema_decay=0.99"]),
    "gpt2, SGD": (1, [*GPT, "optimizer=sgd"]),
    "gpt2, batch 1, Lion": (1, [*GPT, *FEW_TOKENS, "optimizer=lion"]),
    "gpt2, batch 1, Adafactor": (1, [*GPT, *FEW_TOKENS, "optimizer=adafactor"]),
    "gpt2, batch 1, Muon": (1, [*GPT, *FEW_TOKENS, "optimizer=muon"]),
    "gpt2, label smoothing and z-loss": (1, [*GPT, "label_smoothing=0.1", "z_loss=1e-4"]),
    "gpt2, 12 layers": (1, DEEP),
    "gpt2, 12 layers, recomputed": (1, [*DEEP, RECOMPUTE]),
    "gpt2, wide": (1, WIDE),
    "gpt2, wide, bf16-mixed": (1, [*WIDE, "precision=bf16-mixed"]),
    "llama": (1, LLAMA),
    "llama, bf16-mixed": (1, [*LLAMA, "precision=bf16-mixed"]),
    "llama, recomputed, 2 micro-batches": (1, [*LLAMA, RECOMPUTE, "micro_batch_size=4"]),
    "llama, bf16-mixed, selective": (1, [*LLAMA, "precision=bf16-mixed", SELECTIVE]),
    "llama, bf16-mixed, activations offloaded": (1, [*LLAMA, "precision=bf16-mixed", *OFFLOAD]),
    "llama, LoRA on a 4-bit base, bf16-mixed": (1, [*LLAMA, "precision=bf16-mixed", "adapter=qlora"]),
    "llama, untied": (1, [*LLAMA, "model.tie_embeddings=false"]),
    "resnet18": (1, [*RESNET, "global_batch_size=64"]),
    "resnet18, bf16-mixed": (1, [*RESNET, "global_batch_size=64", "precision=bf16-mixed"]),
    "resnet18, recomputed": (1, [*RESNET, "global_batch_size=64", RECOMPUTE]),
    "resnet18, selective": (1, [*RESNET, "global_batch_size=64", SELECTIVE]),
    "resnet50 of timm": (1, TIMM_RESNET),
    "resnet50 of timm, bf16-mixed": (1, [*TIMM_RESNET, "precision=bf16-mixed"]),
    "resnet50 of timm, recomputed": (1, [*TIMM_RESNET, RECOMPUTE]),
    "convnext_tiny of timm": (1, TIMM_CONVNEXT),
    "convnext_tiny of timm, bf16-mixed": (1, [*TIMM_CONVNEXT, "precision=bf16-mixed"]),
    "convnext_tiny of timm, selective": (1, [*TIMM_CONVNEXT, SELECTIVE]),
    "vit_base of timm": (1, TIMM_VIT),
    "vit_base of timm, bf16-mixed, 2 micro-batches": (
        1,
        [*TIMM_VIT, "precision=bf16-mixed", "micro_batch_size=2"],
    ),
    "vit_base of timm, recomputed": (1, [*TIMM_VIT, RECOMPUTE]),
    "ddp": (2, [*GPT, "strategy=ddp"]),
    "ddp, bf16-mixed, 2 micro-batches": (2, [*GPT, "strategy=ddp", "precision=bf16-mixed", "micro_batch_size=2"]),
    "ddp, llama, recomputed": (2, [*LLAMA, "strategy=ddp", RECOMPUTE]),
    "ddp, resnet18": (2, [*RESNET, "global_batch_size=64", "strategy=ddp"]),
    "fsdp": (2, [*GPT, "strategy=fsdp"]),
    "fsdp, bf16-mixed": (2, [*GPT, "strategy=fsdp", "precision=bf16-mixed"]),
    "fsdp, bf16-mixed, recomputed": (2, [*GPT, "strategy=fsdp", "precision=bf16-mixed", RECOMPUTE]),
    "fsdp, bf16-mixed, selective": (2, [*GPT, "strategy=fsdp", "precision=bf16-mixed", SELECTIVE]),
    "fsdp, activations offloaded": (2, [*GPT, "strategy=fsdp", *OFFLOAD]),
    "fsdp, 2 micro-batches": (2, [*GPT, "strategy=fsdp", "micro_batch_size=2"]),
    "fsdp, reduced once a step": (
        2,
        [*GPT, "strategy=fsdp", "micro_batch_size=2", "strategy.gradient_sync=per_step"],
    ),
    "fsdp, offloaded": (2, [*GPT, "strategy=fsdp", "strategy.cpu_offload=true"]),
    "fsdp, 12 layers, batch 2": (2, [*DEEP, "strategy=fsdp", "global_batch_size=2"]),
    "fsdp, llama, bf16-mixed": (2, [*LLAMA, "strategy=fsdp", "precision=bf16-mixed"]),
    "fsdp, tensor": (2, [*GPT, "strategy=fsdp", "tensor_parallel_size=2"]),
    "fsdp, tensor, whole sequences": (
        2,
        [*GPT, "strategy=fsdp", "tensor_parallel_size=2", "sequence_parallel=false"],
    ),
    "fsdp, llama, bf16-mixed, tensor, recomputed": (
        2,
        [*LLAMA, "strategy=fsdp", "precision=bf16-mixed", "tensor_parallel_size=2", RECOMPUTE],
    ),
    "fsdp, experts": (2, [*EXPERTS, "strategy=fsdp"]),
    "fsdp, experts divided": (2, [*EXPERTS, "strategy=fsdp", "expert_parallel_size=2"]),
    "fsdp, experts divided, bf16-mixed, recomputed, 2 micro-batches": (
        2,
        [
            *(*EXPERTS, "strategy=fsdp", "expert_parallel_size=2", "precision=bf16-mixed", RECOMPUTE),
            *("micro_batch_size=2", "strategy.gradient_sync=per_step"),
        ],
    ),
    "fsdp, context": (2, [*GPT, "strategy=fsdp", "context_parallel_size=2"]),
    "fsdp, llama, bf16-mixed, context, 2 micro-batches": (
        2,
        [*LLAMA, "strategy=fsdp", "precision=bf16-mixed", "context_parallel_size=2", "micro_batch_size=4"],
    ),
    "ddp, context": (2, [*GPT, "strategy=ddp", "context_parallel_size=2"]),
    "ZeRO-3, context": (2, [*GPT, "strategy=deepspeed_stage_3", "context_parallel_size=2"]),
    "hsdp": (2, [*GPT, "strategy=hsdp", "data_parallel_shard=2"]),
    "ZeRO-1": (2, [*GPT, "strategy=deepspeed_stage_1"]),
    "ZeRO-1, batch 2": (2, [*GPT, "strategy=deepspeed_stage_1", "global_batch_size=2"]),
    "ZeRO-1, 2 micro-batches": (2, [*GPT, "strategy=deepspeed_stage_1", "micro_batch_size=2"]),
    "ZeRO-2": (2, [*GPT, "strategy=deepspeed_stage_2"]),
    "ZeRO-2, llama, bf16-mixed": (2, [*LLAMA, "strategy=deepspeed_stage_2", "precision=bf16-mixed"]),
    "ZeRO-2, 2 micro-batches": (2, [*GPT, "strategy=deepspeed_stage_2", "micro_batch_size=2"]),
    "ZeRO-3": (2, [*GPT, "strategy=deepspeed_stage_3"]),
    "ZeRO-3, batch 2": (2, [*GPT, "strategy=deepspeed_stage_3", "global_batch_size=2"]),
    "ZeRO-3, recomputed": (2, [*GPT, "strategy=deepspeed_stage_3", RECOMPUTE]),
}


_COMPILED = [*_TEXT, "model.hidden_size=512", "model.num_heads=8", "model.num_layers=4", "compile=true"]
# the same, with compiled blocks: minutes each
COMPILED: dict[str, tuple[int, list[str]]] = {
    "gpt2, compiled": (1, [*_COMPILED, "model=gpt2_nano"]),
    "gpt2, compiled, bf16-mixed": (1, [*_COMPILED, "model=gpt2_nano", "precision=bf16-mixed"]),
    "llama, compiled": (1, [*_COMPILED, "model=llama_nano"]),
    "llama, compiled, bf16-mixed": (1, [*_COMPILED, "model=llama_nano", "precision=bf16-mixed"]),
}


def get_overrides(name: str) -> list[str]:
    """Return the overrides of a case."""
    ranks, overrides = (CASES | COMPILED)[name]
    return [*COMMON, *overrides, f"trainer.devices={ranks}"]


def cpu_cluster(num_ranks: int) -> Cluster:
    """Return this machine as a cluster with the given number of ranks."""
    return find_cluster("auto", per_node=num_ranks, num_nodes=1, interconnect=None, memory_gib=None)
