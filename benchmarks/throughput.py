"""Tokens/s of a recipe against a hand-written GPT-2 script, same shapes and dtype, eager and compiled."""

import statistics
from typing import Any

from measure import in_turn, recipe_step_seconds, report
from plain_gpt2 import train

NUM_ROUNDS = 3
# vocabulary (padded), length, layers, heads, channels; batch; steps; steps skipped; the recipe's words
CASES: dict[str, Any] = {
    "gpt2_nano float32": ((2048, 128, 3, 6, 192), 16, 40, 10, False, ("model=gpt2_nano",)),
    "gpt2_nano bf16": (
        (2048, 128, 3, 6, 192),
        16,
        40,
        10,
        True,
        ("model=gpt2_nano", "precision=bf16-mixed"),
    ),
    "gpt2 (124M), 256 tokens, float32": (
        (50304, 256, 12, 12, 768),
        2,
        5,
        2,
        False,
        ("model=gpt2", "model.max_seq_len=256", "data=random_tokens"),
    ),
}


def main() -> None:
    rows = []
    for case, (shape, batch, steps, skip, bf16, words) in CASES.items():
        common = [f"global_batch_size={batch}", f"trainer.max_steps={steps}", "eval_samples=1"]
        common += ["save_every=null", f"eval_every={10 * steps}", *words]
        seconds: dict[str, list[float]] = {}
        for _ in in_turn(NUM_ROUNDS):
            for compile_ in (False, True):
                kind = "compiled" if compile_ else "eager"
                by_hand = list(train(shape, batch=batch, steps=steps, bf16=bf16, compile_=compile_))
                seconds.setdefault(f"by hand, {kind}", []).extend(by_hand[skip:])
                ours = recipe_step_seconds([*common, f"compile={compile_}".lower()], skip=skip)
                seconds.setdefault(f"recipe, {kind}", []).extend(ours)
        per_second = {
            name: batch * shape[1] / statistics.median(found) for name, found in seconds.items()
        }
        row = {"case": case} | {name: f"{value:,.0f}" for name, value in per_second.items()}
        row["recipe / by hand"] = (
            f"{per_second['recipe, eager'] / per_second['by hand, eager']:.3f}"
        )
        row["compiled / eager"] = (
            f"{per_second['recipe, compiled'] / per_second['recipe, eager']:.3f}"
        )
        rows.append(row)
    report("throughput", rows)


if __name__ == "__main__":
    main()
