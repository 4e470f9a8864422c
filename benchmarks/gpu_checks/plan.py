"""Lists of checks and throughput measurements. Does not import torch."""

from gpu_checks.check import Check

MACHINE = Check(
    name="machine",
    passes_if="torch answers",
    function="environment:machine",
    limit_seconds=120.0,
)
CHECKS = (
    Check(
        name="environment",
        passes_if="fused AdamW, torch.compile, TF32, bfloat16 and a fast attention kernel run",
        function="environment:environment",
        limit_seconds=120.0,
    ),
    Check(
        name="mfu",
        passes_if="SpeedMonitor agrees with a second clock to 3 %; at least 0.9 of a hand-written loop",
        function="speed:mfu",
        limit_seconds=150.0,
    ),
    Check(
        name="parity",
        passes_if="FSDP2, ZeRO 1-3 and offload within 1e-5 of one device in float32",
        function="equality:parity",
        limit_seconds=240.0,  # DeepSpeed compiles its CPU Adam once
    ),
    Check(
        name="components",
        passes_if="models, optimizers, adapters and recomputation within 1e-4 of a CPU in float32",
        function="equality:components",
        limit_seconds=150.0,
    ),
    Check(
        name="low precision",
        passes_if="engines in bf16 and fp16 within twice the spread of one device",
        function="equality:low_precision",
        limit_seconds=120.0,
    ),
    Check(
        name="packed documents",
        passes_if="FlexAttention within 1e-4 of the dense mask on a CPU, in float32",
        function="equality:packed",
        limit_seconds=180.0,
    ),
    Check(
        name="preferences",
        passes_if="engines within 1e-5 of one device, and that within 1e-4 of a CPU, in float32",
        function="equality:preferences",
        limit_seconds=150.0,
    ),
    Check(
        name="policies",
        passes_if="every engine samples the same tokens as one device; norm within 1e-5, in float32",
        function="equality:policies",
        limit_seconds=150.0,
    ),
    Check(
        name="own module",
        passes_if="float32 within 1e-4 of a CPU, 16-mixed within 1e-2, bf16-mixed within 5e-2",
        function="equality:own_module",
        limit_seconds=180.0,
    ),
    Check(
        name="resume after a kill",
        passes_if="weights and optimizer state equal to the last bit, with trainer.deterministic=true",
        function="recovery:resume_after_kill",
        limit_seconds=150.0,
    ),
    Check(
        name="resume of engines",
        passes_if="the next loss and norm equal to the last bit, with trainer.deterministic=true",
        function="equality:resume_of_engines",
        limit_seconds=150.0,
    ),
    Check(
        name="rollback",
        passes_if="an outlier is skipped, and the state restored has the bits it had",
        function="recovery:rollback",
        limit_seconds=90.0,
    ),
    Check(
        name="skip without a sync",
        passes_if="the host never waits for the GPU in steps without a row",
        function="waiting:spike_skip_without_sync",
        limit_seconds=60.0,
    ),
    Check(
        name="asynchronous save",
        passes_if="training waits at most a quarter of the time that saving takes",
        function="waiting:asynchronous_save",
        limit_seconds=120.0,
    ),
    Check(
        name="out of memory",
        passes_if="exit code 71, the overrides that help, a dump and no traceback",
        function="recovery:out_of_memory",
        limit_seconds=90.0,
    ),
    Check(
        name="two ranks",
        passes_if="as parity and resume, with NCCL; a failed rank ends the run",
        function="equality:two_ranks",
        limit_seconds=300.0,
    ),
)


def _speed(
    name: str,
    *overrides: str,
    micro: int,
    sample_gib: float,
    state_gib: float,
    num_gpus: int = 1,
    takes_images: bool = False,
) -> Check:
    arguments = {"overrides": list(overrides), "micro_batch_size": micro}
    arguments |= {"sample_gib": sample_gib, "state_gib": state_gib, "num_gpus": num_gpus}
    arguments |= {"takes_images": takes_images}
    return Check(
        name=name,
        passes_if=" ".join(overrides),
        function="speed:throughput",
        limit_seconds=150.0,
        arguments=arguments,
    )


# GiB per sample and for the train state, from mode=plan: estimates that choose the micro-batch, not results
_GPT2 = {"micro": 64, "sample_gib": 0.36, "state_gib": 2.5}
_MEDIUM = {"micro": 32, "sample_gib": 0.95, "state_gib": 6.5}
_LARGE = {"micro": 24, "sample_gib": 1.7, "state_gib": 14.0}
_XL = {"micro": 16, "sample_gib": 2.7, "state_gib": 28.0}
_LLAMA = {"micro": 32, "sample_gib": 1.3, "state_gib": 3.0}  # 2048 tokens
_LLAMA_1B = {"micro": 8, "sample_gib": 4.2, "state_gib": 24.0}  # 2048 tokens
_LLAMA_1B_LONG = {"micro": 2, "sample_gib": 16.5, "state_gib": 24.0}  # 8192 tokens
_RESNET50 = {"micro": 256, "sample_gib": 0.1, "state_gib": 0.5, "takes_images": True}  # 224 x 224 pixels, eager
_ONE = "recipe=single_bf16"

# bf16 is compiled, because compile=auto does so on a GPU
THROUGHPUT = (
    _speed("gpt2", _ONE, "model=gpt2", **_GPT2),
    _speed("gpt2, eager", _ONE, "model=gpt2", "compile=false", **_GPT2),
    _speed("gpt2, all logits", _ONE, "model=gpt2", "loss_chunk_tokens=null", **_GPT2 | {"micro": 32}),
    _speed("gpt2, max-autotune", _ONE, "model=gpt2", "compile=max-autotune-no-cudagraphs", **_GPT2),
    _speed("gpt2, CUDA graphs", _ONE, "model=gpt2", "compile=reduce-overhead", **_GPT2),
    _speed("gpt2, selective", _ONE, "model=gpt2", "activation_checkpoint=selective", **_GPT2),
    _speed("gpt2, tf32", "recipe=single_fp32", "model=gpt2", "precision=tf32", "compile=true", **_GPT2 | {"micro": 32}),
    _speed("gpt2, all GPUs, ddp", "recipe=ddp_bf16", "model=gpt2", **_GPT2, num_gpus=0),
    _speed("gpt2, all GPUs, fsdp", "recipe=fsdp_bf16", "model=gpt2", **_GPT2, num_gpus=0),
    _speed("gpt2, fsdp", "recipe=fsdp_bf16", "model=gpt2", **_GPT2),
    _speed("gpt2, zero1", "recipe=zero1_bf16", "model=gpt2", **_GPT2),
    _speed("gpt2, zero2", "recipe=zero2_bf16", "model=gpt2", **_GPT2),
    _speed("gpt2, zero3", "recipe=zero3_bf16", "model=gpt2", **_GPT2),
    _speed("gpt2_medium", _ONE, "model=gpt2_medium", **_MEDIUM),
    _speed("gpt2_large", _ONE, "model=gpt2_large", **_LARGE),
    _speed("gpt2_xl", _ONE, "model=gpt2_xl", **_XL),
    _speed("gpt2_xl, selective", _ONE, "model=gpt2_xl", "activation_checkpoint=selective", **_XL),
    _speed("gpt2_xl, fp8", _ONE, "model=gpt2_xl", "precision=fp8-mixed", **_XL),
    _speed("llama_160m", _ONE, "model=llama_160m", **_LLAMA),
    _speed("llama_1b", _ONE, "model=llama_1b", "seq_len=2048", **_LLAMA_1B),
    _speed("llama_1b, fp8", _ONE, "model=llama_1b", "seq_len=2048", "precision=fp8-mixed", **_LLAMA_1B),
    _speed("llama_1b, 8192 tokens", _ONE, "model=llama_1b", "seq_len=8192", **_LLAMA_1B_LONG),
    _speed("resnet50", _ONE, "model=resnet50", "optimizer=sgd", **_RESNET50),
    _speed("resnet50, eager", _ONE, "model=resnet50", "optimizer=sgd", "compile=false", **_RESNET50),
)
