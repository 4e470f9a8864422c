"""Optimizer step of a recipe and of a plain PyTorch loop with the same model and data loader, timed in turns."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from measure import build_run, report, run_in_turn
from torch import nn

SKIP = 10
SMALL = (
    "model.num_layers=1",
    "model.num_heads=2",
    "model.hidden_size=32",
    "seq_len=32",
    "global_batch_size=4",
)
# number of steps and overrides for each case
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "step of 2 ms": (600, SMALL),
    "the same, a row every 10 steps": (600, (*SMALL, "log_every=10")),
    "GPT-2 nano, 32 samples": (110, ("global_batch_size=32",)),
    "the same, in 4 micro-batches": (110, ("global_batch_size=32", "micro_batch_size=8")),
}


def overrides(case: str) -> list[str]:
    """Return a run without saving and evaluation, which leaves only the per-step cost."""
    num_steps, settings = CASES[case]
    return [
        *settings,
        f"trainer.max_steps={num_steps}",
        f"eval_every={10 * num_steps}",
        "save_every=null",
        "eval_samples=1",
        "callbacks.sample_text.num_tokens=1",
    ]


def plain_loop(typed: Sequence[str]) -> Callable[[], None]:
    """Return a bare training step with the model, batches, optimizer, schedule and clipping of the overrides."""
    run = build_run(typed)
    task: Any = run.task
    task.trainer = run.trainer
    run.data.trainer = run.trainer
    task.configure_model()
    setup = task.configure_optimizers()
    model, optimizer, scheduler = task.model, setup["optimizer"], setup["lr_scheduler"]["scheduler"]
    num_micro_batches = run.accumulation.num_micro_batches
    batches = iter(run.data.train_dataloader())

    def step() -> None:
        for _ in range(num_micro_batches):
            batch = next(batches)
            logits = model(batch["inputs"].to(task.device))  # [B, T, V]
            loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].to(task.device).flatten())
            (loss / num_micro_batches).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    rows = []
    for case in CASES:
        found = {}
        for with_callbacks in (False, True):
            recipe, plain = run_in_turn(
                overrides(case), plain_loop(overrides(case)), skip=SKIP, with_callbacks=with_callbacks
            )
            found[with_callbacks] = statistics.median(1e3 * (a - b) for a, b in zip(recipe, plain, strict=True))
        rows.append(
            {
                "case": case,
                "plain loop, ms": f"{1e3 * statistics.median(plain):.2f}",
                "recipe, ms": f"{1e3 * statistics.median(recipe):.2f}",
                "median of the differences, ms": f"{found[True]:.2f}",
                "of which callbacks, ms": f"{found[True] - found[False]:.2f}",
                "ratio of the medians": f"{statistics.median(recipe) / statistics.median(plain):.4f}",
            }
        )
    report("step_overhead", rows)


if __name__ == "__main__":
    main()
