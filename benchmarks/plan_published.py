"""Planned against published: MFU of runs on A100 and H100 reported by others, against the roofline of mode=plan.

The settings are the closest that this project has; each row lists the differences.
"""

from dataclasses import replace
from typing import Any

from measure import report

from callbacks.throughput.peak_flops import get_peak
from recipes.config import compose_and_check
from recipes.plan.hardware import Cluster, find_cluster
from recipes.plan.plan import make_plan
from recipes.plan.roofline import Rates, get_rates

LLAMA = ["model=llama_8b", "activation_checkpoint=full"]
LLM_C = ["precision=bf16-true"]  # 16-bit weights and hidden states
# who, device and count, published MFU in percent (PaLM's count), overrides, differences
RUNS: tuple[tuple[str, str, float, list[str], str], ...] = (
    (
        "build-nanogpt",
        "a100_80",
        50.2,
        ["model=gpt2", "micro_batch_size=16", "global_batch_size=16", "compile=true"],
        "one micro-batch a step, as in that part of the lecture; waits for the device after each",
    ),
    (
        "llm.c",
        "a100_80x8",
        60.2,
        ["model=gpt2", "micro_batch_size=64", "compile=true", *LLM_C],
        "own CUDA kernels; planned in bf16-true",
    ),
    (
        "llm.c",
        "a100_80x8",
        62.3,
        ["model=gpt2_medium", "micro_batch_size=64", "compile=true", *LLM_C],
        "own CUDA kernels; planned in bf16-true",
    ),
    (
        "llm.c",
        "a100_80x8",
        64.4,
        ["model=gpt2_large", "micro_batch_size=32", "compile=true", *LLM_C],
        "own CUDA kernels; planned in bf16-true",
    ),
    (
        "llm.c",
        "h100x8",
        40.7,
        ["model=gpt2", "micro_batch_size=64", "compile=true", *LLM_C],
        "own CUDA kernels; planned in bf16-true",
    ),
    (
        "llm.c",
        "h100x8",
        49.6,
        ["model=gpt2_xl", "micro_batch_size=16", "global_batch_size=1024", "compile=true", *LLM_C],
        "own CUDA kernels; planned in bf16-true; published as 48.7 to 50.5",
    ),
    ("llm-foundry", "a100_80x8", 43.2, ["model=gpt2", "micro_batch_size=64"], "MPT 125m, ALiBi"),
    ("llm-foundry", "a100_80x8", 50.5, ["model=gpt2_medium", "micro_batch_size=32"], "MPT 350m, ALiBi"),
    (
        "torchtitan",
        "h100x8",
        33.7,
        [*LLAMA, "micro_batch_size=2", "global_batch_size=16"],
        "planned for its 2.4 TB/s and 500 W; recomputes selected operators",
    ),
    (
        "torchtitan",
        "h100x8",
        39.0,
        [
            "model=llama_8b",
            "micro_batch_size=2",
            "global_batch_size=16",
            "activation_checkpoint=full",
            "compile=true",
        ],
        "planned for its 2.4 TB/s and 500 W; recomputes selected operators",
    ),
    (
        "torchtitan",
        "h100x128",
        32.8,
        [*LLAMA, "micro_batch_size=2", "global_batch_size=256"],
        "planned for its 2.4 TB/s and 500 W; recomputes selected operators; published as 5,605 tokens/s a GPU",
    ),
    (
        "torchtitan",
        "h100x128",
        38.1,
        [*LLAMA, "micro_batch_size=2", "global_batch_size=256", "compile=true"],
        "planned for its 2.4 TB/s and 500 W; recomputes selected operators; published as 6,514 tokens/s a GPU",
    ),
    (
        "torchtitan",
        "a100_80x8",
        58.2,
        [
            "model=llama_8b",
            "micro_batch_size=1",
            "global_batch_size=8",
            "activation_checkpoint=full",
            "compile=true",
        ],
        "64 GPUs; recomputes selected operators",
    ),
)


def as_of_torchtitan(rates: Rates) -> Rates:
    """Return the rates of torchtitan's H100s, described in its docs/performance.md: 96 GB of HBM2e, 2.4 TB/s, 500 W.

    At the power limit, power grows as the cube of the clock, so 500 W instead of 700 W leaves 89 % of the clock for
    compute-bound work.
    """
    clock = (500 / 700) ** (1 / 3)
    forward, backward = rates.attention
    return replace(rates, bandwidth=2.4e12, matmul=clock * rates.matmul, attention=(clock * forward, clock * backward))


def find_device(hardware: str) -> tuple[Cluster, Rates]:
    """Return the devices and the rates that each of them reaches."""
    cluster = find_cluster(hardware, per_node=None, num_nodes=1, interconnect=None, memory_gib=None)
    device = cluster.device
    assert device.full_name is not None
    assert device.bandwidth is not None
    peaks = {kind: get_peak(device.full_name, kind).tflops or 0.0 for kind in ("bf16", "fp16", "fp32")}  # type: ignore[arg-type]
    return cluster, get_rates(device.full_name, tflops=peaks, bandwidth=device.bandwidth)


def main() -> None:
    rows: list[dict[str, Any]] = []
    for who, hardware, published, overrides, differs in RUNS:
        sharded = "model=llama_8b" in overrides
        recipe = "recipe=single_bf16" if "x" not in hardware else f"recipe={'fsdp' if sharded else 'ddp'}_bf16"
        batch = [] if any(item.startswith("global") for item in overrides) else ["global_batch_size=512"]
        # as published: eager unless stated otherwise, with all logits at once
        common = ["mode=plan", "data=random_tokens", recipe, "compile=false", "loss_chunk_tokens=null", *batch]
        composed, mistakes = compose_and_check([*common, *overrides])
        assert composed is not None
        assert not mistakes, mistakes
        cluster, rates = find_device(hardware)
        if differs.startswith("planned for"):
            rates = as_of_torchtitan(rates)
        plan = make_plan(composed, cluster, rates=rates)
        assert plan.flops is not None
        assert plan.times is not None
        flops = plan.flops.palm * plan.accumulation.global_batch_size
        planned = 100 * flops / plan.times.step_seconds / (rates.tflops["bf16"] * 1e12 * plan.num_ranks)
        rows.append(
            {
                "run": f"{who}: {overrides[0].removeprefix('model=')}, {hardware}"
                + (", compiled" if "compile=true" in overrides else ""),
                "published MFU, %": published,
                "planned MFU, %": round(planned, 1),
                "difference, points": round(planned - published, 1),
                "differs": differs,
            }
        )
    report("plan_published", rows)


if __name__ == "__main__":
    main()
