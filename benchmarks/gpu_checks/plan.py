"""The list of checks, and that of throughput measurements. Imports no torch."""

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
        limit_seconds=180.0,  # DeepSpeed compiles its Adam for the host once
    ),
    Check(
        name="low precision",
        passes_if="engines in bf16 and fp16 within twice the spread of one device",
        function="equality:low_precision",
        limit_seconds=120.0,
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
        limit_seconds=90.0,
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


def _speed(name: str, *overrides: str, micro: int, sample_gib: float, state_gib: float, num_gpus: int = 1) -> Check:
    arguments = {"overrides": list(overrides), "micro_batch_size": micro}
    arguments |= {"sample_gib": sample_gib, "state_gib": state_gib, "num_gpus": num_gpus}
    return Check(
        name=name,
        passes_if=" ".join(overrides),
        function="speed:throughput",
        limit_seconds=150.0,
        arguments=arguments,
    )


# GiB per sample of 1024 tokens (2048 of Llama) and of the state: estimates that choose the micro-batch, not results
_GPT2 = {"micro": 48, "sample_gib": 1.16, "state_gib": 2.5}
_MEDIUM = {"micro": 24, "sample_gib": 2.2, "state_gib": 6.0}
_LLAMA = {"micro": 16, "sample_gib": 2.6, "state_gib": 3.0}
_XL = {"micro": 16, "sample_gib": 1.2, "state_gib": 27.0}

THROUGHPUT = (
    _speed("gpt2", "recipe=single_bf16", "model=gpt2", **_GPT2),
    _speed("gpt2, compiled", "recipe=single_bf16", "model=gpt2", "compile=true", **_GPT2),
    _speed("gpt2, all GPUs, ddp, compiled", "recipe=ddp_bf16", "model=gpt2", "compile=true", **_GPT2, num_gpus=0),
    _speed("gpt2, all GPUs, fsdp, compiled", "recipe=fsdp_bf16", "model=gpt2", "compile=true", **_GPT2, num_gpus=0),
    _speed("gpt2, fsdp", "recipe=fsdp_bf16", "model=gpt2", **_GPT2),
    _speed("gpt2, fsdp, compiled", "recipe=fsdp_bf16", "model=gpt2", "compile=true", **_GPT2),
    _speed("gpt2, zero1", "recipe=zero1_bf16", "model=gpt2", **_GPT2),
    _speed("gpt2, zero2", "recipe=zero2_bf16", "model=gpt2", **_GPT2),
    _speed("gpt2, zero3", "recipe=zero3_bf16", "model=gpt2", **_GPT2),
    _speed("llama_160m, compiled", "recipe=single_bf16", "model=llama_160m", "compile=true", **_LLAMA),
    _speed("gpt2_medium, compiled", "recipe=single_bf16", "model=gpt2_medium", "compile=true", **_MEDIUM),
    _speed(
        "gpt2_xl, compiled, recomputed",
        *("recipe=single_bf16", "model=gpt2_xl", "compile=true", "activation_checkpoint=every_block"),
        **_XL,
    ),
)
