"""An optimizer step of a recipe against a plain PyTorch loop around the same model and the same loader."""

import time
from typing import Any

import torch
import torch.nn.functional as F
from measure import build_run, in_turn, milliseconds, recipe_step_seconds, report, wait_for_device
from torch import nn

NUM_ROUNDS, NUM_STEPS, SKIP = 4, 50, 10
CASES: dict[str, tuple[str, ...]] = {
    "small step": (
        "model.num_layers=1",
        "model.num_heads=2",
        "model.width=32",
        "seq_len=32",
        "global_batch_size=4",
    ),
    "step of 250 ms": ("global_batch_size=32",),
    "4 micro-batches": ("global_batch_size=32", "micro_batch_size=8"),
}


def overrides(case: str) -> list[str]:
    """A run without saving and evaluation in its way: what is left is paid at every step."""
    steps = f"trainer.max_steps={NUM_STEPS}"
    return [
        *CASES[case],
        steps,
        f"eval_every={10 * NUM_STEPS}",
        "save_every=null",
        "eval_samples=1",
    ]


def plain_step_seconds(case: str) -> list[float]:
    """The same model, batches, optimizer, schedule and clipping, and nothing else."""
    run = build_run(overrides(case))
    task: Any = run.task
    task.trainer = run.trainer
    run.data.trainer = run.trainer
    task.configure_model()
    setup = task.configure_optimizers()
    model, optimizer, scheduler = task.model, setup["optimizer"], setup["lr_scheduler"]["scheduler"]
    passes = run.accumulation.num_micro_batches
    batches, seconds = iter(run.data.train_dataloader()), []
    for _ in range(NUM_STEPS):
        wait_for_device()
        began = time.perf_counter()
        for _ in range(passes):
            batch = next(batches)
            logits = model(batch["inputs"].to(task.device))  # [B, T, V]
            loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].to(task.device).flatten())
            (loss / passes).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        wait_for_device()
        seconds.append(time.perf_counter() - began)
    return seconds[SKIP:]


def main() -> None:
    rows = []
    for case in CASES:
        plain: list[float] = []
        ours: list[float] = []
        for _ in in_turn(NUM_ROUNDS):
            plain += plain_step_seconds(case)
            ours += recipe_step_seconds(overrides(case), skip=SKIP)
        more = milliseconds(ours) - milliseconds(plain)
        rows.append(
            {
                "case": case,
                "plain loop, ms": f"{milliseconds(plain):.2f}",
                "recipe, ms": f"{milliseconds(ours):.2f}",
                "more, ms": f"{more:.2f}",
                "ratio": f"{milliseconds(ours) / milliseconds(plain):.4f}",
            }
        )
    report("step_overhead", rows)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
