"""Steps on pairs of uneven lengths, padded and packed, in turns: how much padding is left, and what is saved.

Answers have 20 to 600 tokens, lengths are log-normal around 150. A step is forward and backward pass of SimPO, which
needs no reference, on the same pairs.
"""

import json
import random
import statistics
import string
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import build_run, in_turn, report

from recipes.loss import divide, sum_by_count

NUM_ROUNDS = 9
PAIRS = (1, 4, 8)  # of a micro-batch
MODEL = ("model=llama_nano", "model.vocab_size=257", "model.num_layers=3", "model.num_heads=4", "model.num_kv_heads=4")
MODEL += ("model.hidden_size=192", "model.ffn_hidden_size=512", "model.max_seq_len=640", "tokenizer=bytes")


def write_pairs(path: Path) -> Path:
    draw = random.Random(0)

    def text() -> str:
        length = min(max(int(draw.lognormvariate(5, 0.8)), 20), 600)
        return "".join(draw.choices(string.ascii_lowercase, k=length))

    rows = [{"prompt": f"{row}?", "chosen": text(), "rejected": text()} for row in range(300)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_step(pairs: Path, num_pairs: int, *, packs: bool) -> Callable[[], tuple[int, int]]:
    """Return a step, which returns the number of tokens of its texts, and of the rows that the model reads."""
    typed = ["recipe=simpo", *MODEL, f"data.path={pairs}", f"data.packing={packs}", f"global_batch_size={num_pairs}"]
    run = build_run([*typed, "callbacks=[]", "trainer.accelerator=cpu", "trainer.max_steps=1000"])
    task: Any = run.task
    task.trainer = run.trainer
    run.data.trainer = run.trainer
    task.configure_model()
    batches = iter(run.data.train_dataloader())

    def step() -> tuple[int, int]:
        batch = next(batches)
        divide(sum_by_count(task.own_terms(batch)), batch).backward()
        task.model.zero_grad()
        read = batch["packing"]["inputs"]["cells"] if packs else batch["inputs"]
        return int(batch["num_inputs"].sum()), read.numel()

    return step


def measure(pairs: Path, num_pairs: int) -> list[dict[str, Any]]:
    """Return the rows of a size of micro-batches."""
    steps = {name: make_step(pairs, num_pairs, packs=name == "packed") for name in ("padded", "packed")}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    tokens: dict[str, list[tuple[int, int]]] = {name: [] for name in steps}
    for _ in in_turn(NUM_ROUNDS):
        for name, step in steps.items():
            began = time.perf_counter()
            tokens[name].append(step())
            seconds[name].append(time.perf_counter() - began)
    found = []
    for name in steps:
        num_real, num_read = (sum(column) for column in zip(*tokens[name][1:], strict=True))
        total = sum(seconds[name][1:])
        row = {"pairs": num_pairs, "rows": name, "padding": f"{1 - num_real / num_read:.0%}"}
        row |= {"step, s": f"{statistics.median(seconds[name][1:]):.3f}", "tokens/s": f"{num_real / total:,.0f}"}
        found.append(row | {"faster by": f"{sum(seconds['padded'][1:]) / total:.2f}x"})
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        pairs = write_pairs(Path(name) / "pairs.jsonl")
        report("preference_packing", [row for num_pairs in PAIRS for row in measure(pairs, num_pairs)])


if __name__ == "__main__":
    main()
