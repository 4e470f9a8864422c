"""Cost of saving for GPT-2 124M with AdamW: stall, seconds until verified, memory and hashing.

Synchronous and asynchronous saves alternate in one run.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Any

import recipes  # noqa: F401  # isort: skip  # before Lightning, as in measure.py

import lightning.pytorch as lightning
from lightning.pytorch.callbacks import Callback
from measure import build_run, report

from recipes.checkpoint.manifest import find_content_fault, read_manifest
from recipes.checkpoint.saver import CheckpointSaver

STEPS_BETWEEN = 8
NUM_SAVES = 13  # the first save allocates memory and is reported separately
OVERRIDES = [
    "model=gpt2",
    "data=random_tokens",
    "seq_len=128",
    "global_batch_size=2",
    f"trainer.max_steps={STEPS_BETWEEN * NUM_SAVES + 4}",
    f"save_every={STEPS_BETWEEN}",
    "eval_every=100000",
    "eval_samples=2",
    "log_every=1",
    "callbacks=[grad_norm]",
]


class AlternateSaves(Callback):
    """Makes every other save synchronous, and times each step from its start to the start of the next."""

    def __init__(self, saver: CheckpointSaver) -> None:
        self.writer = saver._writer
        self.began: list[float] = []
        self.resident_gib: list[float] = []

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.began.append(time.perf_counter())
        self.resident_gib.append(_resident_gib())
        self.writer._async_save = _is_asynchronous(trainer.global_step + 1)


def _is_asynchronous(step: int) -> bool:
    return step // STEPS_BETWEEN % 2 == 1


def _resident_gib() -> float:
    """Return the resident set size of this process, from /proc."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line)
    return int(line.split()[1]) / 2**20


def main() -> None:
    run = build_run(OVERRIDES)
    [saver] = [c for c in run.trainer.callbacks if isinstance(c, CheckpointSaver)]  # type: ignore[attr-defined]
    timer = AlternateSaves(saver)
    run.trainer.callbacks.insert(0, timer)  # type: ignore[attr-defined]
    run.trainer.fit(run.task, datamodule=run.data)
    seconds = [after - before for before, after in zip(timer.began, timer.began[1:], strict=False)]
    lines = (run.folder / "events.jsonl").read_text().splitlines()
    saves = [event for event in map(json.loads, lines) if event["event"] == "checkpoint"]
    saves = [event for event in saves if event["step"] % STEPS_BETWEEN == 0]
    # three of the last steps before each save, when nothing is being written
    quiet = [seconds[event["step"] - back - 1] for event in saves[1:] for back in (2, 3, 4)]
    rows = [
        _row("training waits", saves[1:], seconds, statistics.median(quiet), behind=False),
        _row("behind training", saves[1:], seconds, statistics.median(quiet), behind=True),
    ]
    rows[1]["first_save_added_seconds"] = _added(saves[0], seconds, statistics.median(quiet))
    rows[0]["first_save_added_seconds"] = None
    held = timer.resident_gib
    shared = {
        "step_seconds": round(statistics.median(quiet), 3),
        "checkpoint_gib": round(saves[-1]["bytes"] / 2**30, 3),
        "extra_host_gib": round(max(held) - held[STEPS_BETWEEN - 1], 3),
        "hash_seconds": _hash_seconds(run.folder / "checkpoints" / "last"),
    }
    report("checkpoint", [row | shared for row in rows])


def _row(name: str, saves: list[dict[str, Any]], seconds: list[float], quiet: float, *, behind: bool) -> dict[str, Any]:
    chosen = [event for event in saves if _is_asynchronous(event["step"]) == behind]
    # steps that run while files are being written
    during = [
        seconds[index]
        for event in chosen
        for index in range(event["step"], event["step"] + int(event["seconds"] / quiet))
    ]
    return {
        "saving": name,
        "saves": len(chosen),
        "stall_seconds": round(statistics.median(e["stall_seconds"] for e in chosen), 4),
        "until_proven_seconds": round(statistics.median(e["seconds"] for e in chosen), 2),
        "added_seconds": statistics.median(_added(event, seconds, quiet) for event in chosen),
        "tokens_per_second_while_writing": round(quiet / statistics.median(during), 3) if behind and during else None,
    }


def _added(event: dict[str, Any], seconds: list[float], quiet: float) -> float:
    """Return the extra seconds spent in steps from a save until shortly before the next one."""
    around = seconds[event["step"] - 1 : event["step"] + STEPS_BETWEEN - 4]
    return round(sum(around) - len(around) * quiet, 3)


def _hash_seconds(checkpoint: Path) -> float:
    """Return the seconds to hash every file again, as loading does, from the page cache."""
    manifest = read_manifest(checkpoint)
    assert manifest is not None
    began = time.perf_counter()
    assert find_content_fault(checkpoint, manifest, manifest.files) is None
    return round(time.perf_counter() - began, 3)


if __name__ == "__main__":
    main()
