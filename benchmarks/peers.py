"""A recipe's training step compared with hand-written PyTorch, plain Lightning, the Hugging Face Trainer and litgpt.

Each contender runs in a separate process, one after the other, in several rounds: A B C A B C. A table shows the
median over rounds and, for each peer, its step time relative to the recipe's in the same round.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from measure import RESULTS, in_turn, report

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(Path(__file__).parent / "contenders"))

from spec import Spec  # noqa: E402

PEERS = os.environ.get("PEERS_PYTHON", str(ROOT / ".venv-peers" / "bin" / "python"))
ROUNDS = 3
SMALL = Spec(
    family="gpt2",
    tokens="",
    vocab_size=65,
    seq_len=64,
    num_layers=4,
    num_heads=4,
    hidden_size=128,
    batch=12,
    steps=150,
    skip=30,
    bf16=False,
    compile=False,
    threads=1,
)
LARGE = replace(
    SMALL,
    vocab_size=50257,
    seq_len=256,
    num_layers=12,
    num_heads=12,
    hidden_size=768,
    batch=4,
    steps=6,
    skip=16,  # in a virtual machine, first-touch page faults cost host time
    threads=None,
)
OF_GPT2 = ("by_hand", "plain_lightning", "hf_trainer")
# the training setup, and the peers that can run it
CASES: dict[str, tuple[Spec, tuple[str, ...]]] = {
    "GPT-2 4 x 128, 12 x 64 tokens, float32, 1 thread": (SMALL, OF_GPT2),
    "Llama 4 x 128, 12 x 64 tokens, float32, 1 thread": (
        replace(SMALL, family="llama", vocab_size=64),
        ("hf_trainer", "litgpt_pretrain"),
    ),
    "GPT-2 124M, 4 x 256 tokens, float32": (LARGE, ("by_hand", "plain_lightning")),
    "GPT-2 124M, 4 x 256 tokens, bf16": (replace(LARGE, bf16=True), ("by_hand",)),
}


def run(contender: str, spec: Spec) -> dict[str, float]:
    """Run a contender in a separate process and return its reported results."""
    python = PEERS if contender in ("hf_trainer", "litgpt_pretrain") else sys.executable
    script = Path(__file__).parent / "contenders" / f"{contender}.py"
    finished = subprocess.run([python, str(script), spec.to_argument()], capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise RuntimeError(f"{contender} has failed:\n{finished.stdout[-1000:]}{finished.stderr[-3000:]}")
    found: dict[str, float] = json.loads(finished.stdout.strip().splitlines()[-1])
    return found


def compare(case: str, tokens: Path) -> list[dict[str, Any]]:
    """Return the rows of one case, one per contender."""
    spec, peers = CASES[case]
    spec = replace(spec, tokens=str(tokens))
    entries = [(name, compiled) for compiled in (False, True) for name in ("recipe", *peers)]
    found: dict[tuple[str, bool], list[dict[str, float]]] = {entry: [] for entry in entries}
    for _ in in_turn(ROUNDS):
        for name, compiled in entries:
            found[name, compiled].append(run(name, replace(spec, compile=compiled)))
    rows = []
    for name in ("recipe", *peers):
        row: dict[str, Any] = {"case": case, "contender": name.replace("_", " ")}
        for kind, compiled in (("eager", False), ("compiled", True)):
            seconds = [one["seconds"] for one in found[name, compiled]]
            ours = [one["seconds"] for one in found["recipe", compiled]]
            ratios = [a / b for a, b in zip(seconds, ours, strict=True)]
            row[f"{kind}, ms"] = f"{1e3 * statistics.median(seconds):.1f}"
            row[f"{kind} / recipe"] = f"{statistics.median(ratios):.2f}"
        row["peak GB"] = f"{statistics.median(one['peak_rss_bytes'] for one in found[name, False]) / 1e9:.2f}"
        rows.append(row)
        print(row, file=sys.stderr)
    return rows


def main() -> None:
    chosen = [case for case in CASES if all(word in case for word in sys.argv[1:])]
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.bin"
        np.random.default_rng(0).integers(64, size=4_000_000, dtype=np.uint16).tofile(tokens)
        rows = {case: compare(case, tokens) for case in chosen}
    if len(chosen) < len(CASES):  # some cases were selected on the command line; the others keep their rows
        for row in json.loads((RESULTS / "peers.json").read_text(encoding="utf-8"))["rows"]:
            if row["case"] not in chosen:
                rows.setdefault(row["case"], []).append(row)
    report("peers", [row for case in CASES if case in rows for row in rows[case]], command="make bench")


if __name__ == "__main__":
    main()
