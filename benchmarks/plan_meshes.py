"""Planned against published: runs with tensor, context, pipeline or expert parallelism, up to a trillion parameters.

Llama 3 405B: arXiv 2407.21783, table 4. GPT up to a trillion parameters: arXiv 2205.05198, table 5, whose FLOPs count
attention in full. DeepSeek-V3: arXiv 2412.19437, sections 1 and 3: 180,000 H800 hours for 10^12 tokens, 1,543 tokens
per second and GPU, or 44 % MFU by this project's FLOP count and bfloat16 peak. Memory was not published, but it
was sufficient.
"""

from typing import Any

from measure import report
from plan_published import find_device

from recipes.config import compose_and_check
from recipes.plan.plan import get_limit, gib, make_plan

_LLAMA = [
    *("model=llama_8b", "model.num_layers=126", "model.hidden_size=16384", "model.num_heads=128"),
    *("model.num_kv_heads=8", "model.ffn_hidden_size=53248", "tensor_parallel_size=8", "pipeline_parallel_size=16"),
    *("pipeline_schedule=Interleaved1F1B", "micro_batch_size=1"),
]
_LONG = ["seq_len=131072", "model.max_seq_len=131072", "context_parallel_size=16"]
_TWO_STAGES = "2 stages on a rank; the published number of them is not known"


def _gpt(layers: int, hidden: int, heads: int, *, stages: int, batch: int) -> list[str]:
    schedule = "Interleaved1F1B" if stages == 8 else "1F1B"
    return [
        *("model=gpt2", f"model.num_layers={layers}", f"model.hidden_size={hidden}", f"model.num_heads={heads}"),
        *("model.vocab_size=51200", "seq_len=2048", "model.max_seq_len=2048", "model.vocab_pad_multiple=128"),
        *("tensor_parallel_size=8", f"pipeline_parallel_size={stages}", f"pipeline_schedule={schedule}"),
        *(f"global_batch_size={batch}", f"micro_batch_size={4 if stages == 1 else 1}"),
        *("activation_checkpoint=selective", "model.dropout=0"),
    ]


# name, hardware, published MFU in percent, overrides, differences
RUNS: tuple[tuple[str, str, float, list[str], str], ...] = (
    ("Llama 3 405B, 8,192 tokens", "h100x8192", 43.0, [*_LLAMA, "global_batch_size=2048"], _TWO_STAGES),
    ("Llama 3 405B, 8,192 tokens", "h100x16384", 41.0, [*_LLAMA, "global_batch_size=2048"], _TWO_STAGES),
    (
        "Llama 3 405B, 131,072 tokens",
        "h100x16384",
        38.0,
        [*_LLAMA, *_LONG, "global_batch_size=128"],
        f"{_TWO_STAGES}; gathers keys and values, here heads are exchanged",
    ),
    ("GPT 22B", "a100_80x8", 41.5, _gpt(48, 6144, 64, stages=1, batch=4), "own kernels"),
    (
        "GPT 175B",
        "a100_80x64",
        51.4,
        _gpt(96, 12288, 96, stages=8, batch=64),
        "own kernels; 3 stages on a rank, here 2",
    ),
    (
        "GPT 530B",
        "a100_80x280",
        56.0,
        _gpt(105, 20480, 128, stages=35, batch=280),
        "own kernels; 3 stages on a rank, here 1",
    ),
    ("GPT 1T", "a100_80x512", 56.3, _gpt(128, 25600, 160, stages=64, batch=512), "own kernels"),
    (
        "DeepSeek-V3, 671B",
        "h100x2048",
        43.9,
        [
            *("model=deepseek_v3", "seq_len=4096", "global_batch_size=15360", "micro_batch_size=1"),
            *("expert_parallel_size=64", "pipeline_parallel_size=16", "pipeline_schedule=Interleaved1F1B"),
            "activation_checkpoint=selective",
        ],
        "products in float8, exchanges hidden behind computation, a token sent to a node once",
    ),
)


def main() -> None:
    rows: list[dict[str, Any]] = []
    for name, hardware, published, overrides, differs in RUNS:
        cluster, rates = find_device(hardware)
        row: dict[str, Any] = {"run": f"{name}, {cluster.num_devices:,} x {cluster.device.name}"}
        row["published MFU, %"] = published
        for precision in ("bf16-mixed", "bf16-true"):
            common = ["mode=plan", "data=random_tokens", "recipe=fsdp_bf16", f"precision={precision}", "compile=true"]
            composed, mistakes = compose_and_check([*common, *overrides])
            assert composed is not None
            assert not mistakes, mistakes
            plan = make_plan(composed, cluster, rates=rates)
            assert plan.flops is not None
            assert plan.times is not None
            flops = plan.flops.palm * plan.accumulation.global_batch_size
            planned = 100 * flops / plan.times.step_seconds / (rates.tflops["bf16"] * 1e12 * plan.num_ranks)
            row |= {
                f"planned MFU in {precision}, %": round(planned, 1),
                f"planned GiB a rank in {precision}": round(gib(plan.peak.total), 1),
                "bubble, %": round(100 * (plan.times.bubble or 0.0), 1),
            }
        row |= {"GiB usable": round(gib(get_limit(cluster)), 1), "differs": differs}
        print(row, flush=True)
        rows.append(row)
    report("plan_meshes", rows)


if __name__ == "__main__":
    main()
