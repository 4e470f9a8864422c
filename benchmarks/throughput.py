"""Tokens/s of a recipe and of a hand-written GPT-2 script with the same shapes and dtype, eager and compiled."""

import functools
import statistics
from typing import Any

from measure import report, run_in_turn
from plain_gpt2 import train

# (padded vocabulary, length, layers, heads, channels), batch, steps, steps skipped, bf16, overrides of the recipe
CASES: dict[str, Any] = {
    "gpt2_nano float32": ((2048, 128, 3, 6, 192), 16, 120, 10, False, ("model=gpt2_nano",)),
    "gpt2_nano bf16": (
        (2048, 128, 3, 6, 192),
        16,
        120,
        10,
        True,
        ("model=gpt2_nano", "precision=bf16-mixed"),
    ),
    "gpt2 (124M), 256 tokens, float32": (
        (50304, 256, 12, 12, 768),
        2,
        9,
        2,
        False,
        ("model=gpt2", "model.max_seq_len=256", "data=random_tokens"),
    ),
}


def main() -> None:
    rows = []
    for case, (shape, batch, steps, skip, bf16, settings) in CASES.items():
        common = [f"global_batch_size={batch}", f"trainer.max_steps={steps}", "eval_samples=1"]
        common += ["save_every=null", f"eval_every={10 * steps}", *settings]
        common += [
            "callbacks.sample_text.num_tokens=1",
            "log_every=10",
        ]  # as in single_bf16
        rate: dict[str, float] = {}
        for kind in ("eager", "compiled"):
            compiled = kind == "compiled"
            by_hand = train(shape, batch=batch, steps=steps + 1, bf16=bf16, compile_=compiled)
            overrides = [*common, f"compile={str(compiled).lower()}"]
            found = run_in_turn(overrides, functools.partial(next, by_hand), skip=skip)
            for name, seconds in zip(("recipe", "by hand"), found, strict=True):
                rate[f"{name}, {kind}"] = batch * shape[1] / statistics.median(seconds)
        row = {"case": case} | {name: f"{value:,.0f}" for name, value in rate.items()}
        row["recipe / by hand"] = f"{rate['recipe, eager'] / rate['by hand, eager']:.3f}"
        row["compiled / eager"] = f"{rate['recipe, compiled'] / rate['recipe, eager']:.3f}"
        rows.append(row)
    report("throughput", rows)


if __name__ == "__main__":
    main()
