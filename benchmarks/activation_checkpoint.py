"""Memory and time per step for each `activation_checkpoint=`: measured on this machine's CPU, and planned for it.

Eager steps are timed in turns, and the shortest time is reported: other load on the machine can only add time.

python benchmarks/activation_checkpoint.py         every option on a small GPT-2
python benchmarks/activation_checkpoint.py share   how far chunks of logits and fewer products reduce a GPT-2's peak:
                                                   planned for 1.5B on an H100, planned and measured for one that fits
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measure import build_run, in_turn, report

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / folder) for folder in ("parity", "")]

from plan_cases import COMMON, cpu_cluster  # noqa: E402
from plan_steps import step_of  # noqa: E402
from support import composed_config, resolved  # noqa: E402

from recipes.mode.batch_find import PeakMemory  # noqa: E402
from recipes.plan.hardware import find_cluster  # noqa: E402
from recipes.plan.measured import time_real_steps  # noqa: E402
from recipes.plan.plan import make_plan  # noqa: E402

MIB = 2**20
ROUNDS = 10
MODEL = ["model=gpt2_nano", "data=random_tokens", "model.vocab_size=2048", "seq_len=128", "model.max_seq_len=128"]
MODEL += ["model.hidden_size=256", "model.num_heads=4", "model.num_layers=6", "trainer.max_steps=3"]
# GPT-2 1.5B with a fifth of the width and of the tokens, a quarter of the blocks and a twentieth of the vocabulary:
# weights, activations and logits take nearly the same shares of the memory
SCALED = ["model=gpt2_nano", "data=random_tokens", "model.vocab_size=2515", "seq_len=256", "model.max_seq_len=256"]
SCALED += ["model.hidden_size=320", "model.num_heads=5", "model.num_layers=12", "precision=bf16-mixed"]
SCALED += ["global_batch_size=12", "trainer.max_steps=3"]
XL = [
    *("mode=plan", "recipe=single_bf16", "model=gpt2_xl", "data=random_tokens", "global_batch_size=16"),
    "plan.hardware=h100",
]
H100 = find_cluster("h100", per_node=1, num_nodes=1, interconnect=None, memory_gib=None)
ALL_LOGITS = "loss_chunk_tokens=null"
SELECTIVE = "activation_checkpoint=selective"
BY_THIRDS = [SELECTIVE, "activation_checkpoint.keep_every_nth_product=3"]
# the option, its overrides, and the same chunk of the tokens for both models: 4,096 of 16,384, 768 of 3,072
SHARES: dict[str, tuple[list[str], list[str]]] = {
    "all logits, all activations": ([ALL_LOGITS], [ALL_LOGITS]),
    "logits in chunks": ([], ["loss_chunk_tokens=768"]),
    "and selective": (
        ["activation_checkpoint=selective"],
        ["loss_chunk_tokens=768", "activation_checkpoint=selective"],
    ),
    "and every third product": (BY_THIRDS, ["loss_chunk_tokens=768", *BY_THIRDS]),
}
BUDGET = "activation_checkpoint=memory_budget"
OPTIONS: dict[str, list[str]] = {
    "none": [],
    "selective": ["activation_checkpoint=selective"],
    "selective, every second product": [
        "activation_checkpoint=selective",
        "activation_checkpoint.keep_every_nth_product=2",
    ],
    "every_nth": ["activation_checkpoint=every_nth"],
    "full": ["activation_checkpoint=full"],
    "offload": ["activation_checkpoint=offload"],
    "full, offload": ["activation_checkpoint=full", "activation_checkpoint.offload=true"],
    "none, compiled": ["compile=true"],
    "memory_budget 0.5, compiled": [BUDGET, "compile=true"],
    "memory_budget 0, compiled": [BUDGET, "activation_checkpoint.memory_budget=0", "compile=true"],
    "full, compiled": ["activation_checkpoint=full", "compile=true"],
}


def measure_peak(overrides: Sequence[str]) -> int:
    """Return the peak number of bytes allocated by torch in the third step of a run."""
    torch._dynamo.reset()  # the budget is not a guard: blocks compiled under another budget would be reused
    with PeakMemory(2) as memory:
        run = build_run([*COMMON, *overrides, "eval_every=1000"])
        run.trainer.callbacks.append(memory)  # type: ignore[attr-defined]
        run.trainer.fit(run.task, datamodule=run.data)
    assert memory.peak_bytes is not None
    return memory.peak_bytes


def compare_shares() -> None:
    """Report the peak of a plain run that is left by each option, of GPT-2 1.5B and of its scaled model."""
    rows: list[dict[str, Any]] = []
    plain: tuple[float, float] | None = None
    for name, (large, small) in SHARES.items():
        planned_xl = make_plan(resolved(composed_config(*XL, *large)), H100, rates=None).peak.total
        planned = make_plan(resolved(composed_config(*COMMON, *SCALED, *small)), cpu_cluster(1), rates=None).peak.total
        measured = measure_peak([*SCALED, *small])
        plain = plain or (planned_xl, measured)
        rows.append(
            {
                "option": name,
                "GPT-2 1.5B, planned, GiB": round(planned_xl / 2**30, 1),
                "share planned, %": round(100 * planned_xl / plain[0], 1),
                "scaled, planned, MiB": round(planned / MIB, 1),
                "scaled, measured, MiB": round(measured / MIB, 1),
                "share measured, %": round(100 * measured / plain[1], 1),
            }
        )
    report("memory_share", rows, command="python benchmarks/activation_checkpoint.py share")


def main() -> None:
    if sys.argv[1:] == ["share"]:
        compare_shares()
        return
    eager = {name: overrides for name, overrides in OPTIONS.items() if "compile=true" not in overrides}
    steps = {name: step_of([*MODEL, *overrides], 1) for name, overrides in eager.items()}
    shortest = dict.fromkeys(eager, float("inf"))
    for _ in in_turn(ROUNDS):
        for name, step in steps.items():
            seconds = time_real_steps(step, blocks=None, device=torch.device("cpu"), num_steps=4)
            shortest[name] = min(shortest[name], *seconds)
    rows: list[dict[str, Any]] = []
    for name, overrides in OPTIONS.items():
        plan = make_plan(resolved(composed_config(*COMMON, *MODEL, *overrides)), cpu_cluster(1), rates=None)
        rows.append(
            {
                "option": name,
                "planned_mib": round(plan.peak.total / MIB, 1),
                "measured_mib": round(measure_peak([*MODEL, *overrides]) / MIB, 1),
                "ms_per_step": round(1000 * shortest[name]) if name in shortest else None,
            }
        )
    report("activation_checkpoint", rows)


if __name__ == "__main__":
    main()
