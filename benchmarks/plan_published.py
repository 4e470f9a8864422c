"""Planned against published: MFU of runs on A100 and H100 reported by others, against the roofline of mode=plan.

The settings are the closest that this project has; each row lists the differences. `… images` compares published
images/s of image models, on an RTX 3090 too.
"""

import sys
from dataclasses import replace
from typing import Any

from measure import report
from torch import Tensor, nn

from callbacks.throughput.peak_flops import get_peak
from recipes.config import compose_and_check
from recipes.plan.hardware import Cluster, find_cluster
from recipes.plan.plan import make_plan
from recipes.plan.roofline import Rates, get_rates
from recipes.torchvision_import import repair

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


NVIDIA = "NVIDIA, DeepLearningExamples, RN50v1.5 of March 2021"
DDP_BENCH = "pytorch-ddp-bench (willgpaik)"
NEMO = "NVIDIA, NeMo Framework, performance of ViT"
TIMM = "timm 0.8, results/benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv"
BIONEMO = "nvSubquadratic (NVIDIA BioNeMo), benchmarks"
TORCHVISION = ["task=classification", "model._target_=plan_published.VisionTransformer", "+model.num_classes=1000"]
TORCHVISION += ["data.in_channels=3"]
# who, device and count, published images/s, images per device and step, overrides, differences
IMAGE_RUNS: tuple[tuple[str, str, float, int, list[str], str], ...] = (
    (NVIDIA, "a100_80", 2470, 256, ["model.name=resnet50", "optimizer=sgd"], "reads ImageNet with DALI"),
    (DDP_BENCH, "a100_80", 1190, 512, ["model.name=resnet152", "optimizer=sgd"], "float16"),
    (DDP_BENCH, "a100_80", 1030, 1024, TORCHVISION, "float16; torchvision's ViT-B/16, whose attention copies more"),
    (NEMO, "a100_80x8", 693, 32, ["model.name=vit_giant_patch14_224"], "Megatron; images per GPU not published"),
    (NEMO, "h100x8", 1428, 32, ["model.name=vit_giant_patch14_224"], "Megatron; images per GPU not published"),
    (BIONEMO, "h100", 7716, 256, ["model.name=vit_small_patch16_224", "compile=true"], "ViT-5: rotary positions, LAMB"),
    (TIMM, "rtx3090", 1218, 512, ["model.name=resnet50", "optimizer=sgd"], "float16"),
    (TIMM, "rtx3090", 819, 256, ["model.name=convnext_tiny", "optimizer=sgd"], "float16"),
    (TIMM, "rtx3090", 1058, 384, ["model.name=vit_small_patch16_224", "optimizer=sgd"], "float16, torch 1.12"),
    (TIMM, "rtx3090", 393, 192, ["model.name=vit_base_patch16_224", "optimizer=sgd"], "float16, torch 1.12"),
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


class VisionTransformer(nn.Module):
    """torchvision's ViT-B/16."""

    def __init__(self, *, num_classes: int) -> None:
        super().__init__()
        repair()
        from torchvision.models import vit_b_16

        self.inner: Any = vit_b_16(num_classes=num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.inner(images)
        return logits

    def init_weights(self, seed: int) -> None:
        raise NotImplementedError  # it is planned, not trained


def compare_images() -> None:
    """Compare published images/s with planned ones, and the MFU of both by the FLOPs that are counted here."""
    rows: list[dict[str, Any]] = []
    for who, hardware, published, batch, overrides, differs in IMAGE_RUNS:
        cluster, rates = find_device(hardware)
        num_devices = cluster.num_devices
        typed = ["mode=plan", "data=random_images", "data.image_size=224", "metrics=none", "data.num_classes=1000"]
        typed += [f"recipe={'ddp' if num_devices > 1 else 'single'}_bf16", f"micro_batch_size={batch}"]
        typed += [f"global_batch_size={batch * num_devices}"]
        typed += [] if overrides is TORCHVISION else ["model=timm"]
        typed += [] if "compile=true" in overrides else ["compile=false"]
        composed, mistakes = compose_and_check([*typed, *overrides])
        assert composed is not None
        assert not mistakes, mistakes
        plan = make_plan(composed, cluster, rates=rates)
        assert plan.times is not None
        planned = plan.accumulation.global_batch_size / plan.times.step_seconds
        name = "vit_base_patch16_224" if overrides is TORCHVISION else overrides[0].removeprefix("model.name=")
        flops = count_flops(name)
        # of an image at the peak of all devices
        share = 100 * flops / (rates.tflops["bf16"] * 1e12 * num_devices)
        rows.append(
            {
                "run": f"{name}, {hardware}, {batch} images" + (", compiled" if "compile=true" in overrides else ""),
                "published, images/s": published,
                "planned, images/s": round(planned),
                "published MFU, %": round(share * published, 1),
                "planned MFU, %": round(share * planned, 1),
                "difference, points": round(share * (planned - published), 1),
                "source": who,
                "differs": differs,
            }
        )
        print(rows[-1], flush=True)
    report("plan_published_images", rows, command="python benchmarks/plan_published.py images")


def count_flops(name: str) -> float:
    """Return the FLOPs of an image of 224 x 224 pixels in a step of a model of timm."""
    typed = ["model=timm", f"model.name={name}", "data=random_images", "data.image_size=224", "recipe=single_fp32"]
    composed, mistakes = compose_and_check([*typed, "mode=plan", "metrics=none", "data.num_classes=1000"])
    assert composed is not None
    assert not mistakes, mistakes
    flops = make_plan(composed, find_device("h100")[0], rates=None).flops
    assert flops is not None
    return flops.palm


if __name__ == "__main__":
    compare_images() if "images" in sys.argv[1:] else main()
