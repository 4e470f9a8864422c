"""Check `mode=diagnose` on deliberately broken and healthy runs: is its first finding right, are healthy runs quiet?

`python benchmarks/diagnose.py` trains each run in a separate process, ten minutes on one core, and records reduced
curves for the tests. With run names as arguments, only those are trained and nothing is recorded.
`python benchmarks/diagnose.py clean` counts findings in healthy runs with other seeds, and `python
benchmarks/diagnose.py kinds` in the kinds of training from `benchmarks/spikes.py healthy`.
"""

import csv
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import yaml
from diagnosed_runs import DIGITS_RUNS, EXPECTED, RECIPE_RUNS, train_digits
from healthy_runs import KINDS, record
from measure import report

from callbacks.diagnosis.diagnose import examine
from callbacks.diagnosis.read import read_points, read_run
from callbacks.diagnosis.run import make_run

ROOT = Path(__file__).parent.parent
RECORDED = ROOT / "tests/callbacks/diagnosis/runs"
# config settings that the symptoms read
SETTINGS = (
    "mode._target_",
    "model.vocab_size",
    "model.num_classes",
    "model.dropout",
    "optimizer.lr",
    "optimizer.betas",
    "scheduler.num_steps",
    "warmup_steps",
    "eval_every",
    "trainer.max_steps",
    "trainer.gradient_clip_val",
    "loader.num_workers",
)
UNUSED = ("throughput/tflops", "throughput/total_tflops", "throughput/device_tokens_per_second", "train/tokens")
UNUSED += (
    "throughput/samples_per_second",
    "time/excluded_seconds",
    "train/samples",
    "val/perplexity",
    "val/token_accuracy",
)
SEEDS = (1, 2, 3)
HEALTHY_STEPS = 3_000


def main() -> None:
    if sys.argv[1:2] == ["train"]:
        _train(sys.argv[2], Path(sys.argv[3]))
        return
    if sys.argv[1:] == ["clean"]:
        report("diagnose_clean", _count_seeds(), command="python benchmarks/diagnose.py clean")
        return
    if sys.argv[1:] == ["kinds"]:
        report("diagnose_kinds", _count_kinds(), command="python benchmarks/diagnose.py kinds")
        return
    rows = []
    for name in sys.argv[1:] or EXPECTED:
        with tempfile.TemporaryDirectory(prefix="diagnose_") as folder:
            seconds = _train_alone(name, Path(folder))
            findings = [finding.name for finding in examine(read_run(Path(folder))).findings]
            _record(Path(folder), RECORDED / name)
        recorded = [finding.name for finding in examine(read_run(RECORDED / name)).findings]
        assert recorded == findings, f"{name}: {findings} in the run, {recorded} in what is recorded of it"
        expected = EXPECTED[name]
        rows.append(
            {
                "run": name.replace("_", " "),
                "made to show": (expected or "nothing").replace("_", " "),
                "first finding": (findings[0] if findings else "none").replace("_", " "),
                "others": ", ".join(findings[1:]).replace("_", " "),
                "right": "yes" if (findings[0] if findings else None) == expected else "no",
                "seconds": round(seconds),
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    if len(rows) == len(EXPECTED):
        report("diagnose", rows)


def _train_alone(name: str, folder: Path, *more: str) -> float:
    """Train in a separate process; return the seconds it took."""
    began = time.perf_counter()
    program = [sys.executable, str(Path(__file__)), "train", name, str(folder)]
    if name in RECIPE_RUNS:
        program = [sys.executable, "train.py", *RECIPE_RUNS[name], *more, f"hydra.run.dir={folder}"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 3), done.stdout + done.stderr  # 3: diverged
    return time.perf_counter() - began


def _train(name: str, folder: Path) -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    train_digits(DIGITS_RUNS[name], folder)


def _record(run: Path, folder: Path) -> None:
    """Write the data that the symptoms read: curves rounded to four digits, a few settings, and the status."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    points, _ = read_points(run / "metrics.csv")
    unused = [*UNUSED, *(["time/step_seconds"] if "throughput/tokens_per_second" in points else [])]
    columns = {name: dict(column) for name, column in points.items() if name not in unused}
    steps = sorted({step for column in columns.values() for step in column})
    with (folder / "metrics.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *columns])
        for step in steps:
            writer.writerow([step, *(_short(column.get(step)) for column in columns.values())])
    size = (folder / "metrics.csv").stat().st_size
    assert size < 25_000, f"{folder.name}: {size} bytes"
    if not (run / "config.yaml").is_file():
        return
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    (folder / "config.yaml").write_text(yaml.safe_dump(_reduce(config)), encoding="utf-8")
    for file in ("summary.json", "events.jsonl"):
        lines = (run / file).read_text(encoding="utf-8").splitlines() if file.endswith("l") else []
        kept = [{key: event[key] for key in ("step", "event") if key in event} for event in map(json.loads, lines)]
        text = "".join(json.dumps(event) + "\n" for event in kept)
        if not lines:
            text = json.dumps({"status": json.loads((run / file).read_text(encoding="utf-8"))["status"]}) + "\n"
        (folder / file).write_text(text, encoding="utf-8")


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _reduce(config: dict[str, Any]) -> dict[str, Any]:
    reduced: dict[str, Any] = {}
    for key in SETTINGS:
        node, place = config, reduced
        *parents, last = key.split(".")
        for parent in parents:
            node, place = node.get(parent, {}), place.setdefault(parent, {})
        if last in node:
            place[last] = node[last]
    return reduced


def _count_seeds() -> list[dict[str, Any]]:
    """Count the findings in healthy train.py runs with other seeds."""
    rows = []
    for name in [name for name, expected in EXPECTED.items() if expected is None and name in RECIPE_RUNS]:
        found: list[str] = []
        for seed in SEEDS:
            with tempfile.TemporaryDirectory(prefix="diagnose_") as folder:
                _train_alone(name, Path(folder), f"seed={seed}")
                found += [finding.name for finding in examine(read_run(Path(folder))).findings]
        rows.append(_row(name.replace("_", " "), len(SEEDS), found))
    return rows


def _count_kinds() -> list[dict[str, Any]]:
    """Count the findings in other kinds of healthy training."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # losses of 1e-38 would slow each step down tenfold
    rows = []
    for kind in KINDS:
        found = []
        for seed in SEEDS[:2]:
            series = list(record(kind, num_steps=HEALTHY_STEPS, seed=seed))
            columns = {
                column: [(step, row[number]) for step, row in enumerate(series)]
                for number, column in enumerate(("train_loss", "grad_norm", "lr"))
            }
            found += [finding.name for finding in examine(make_run(columns, folder=Path("run"))).findings]
        rows.append(_row(kind, 2, found))
    return rows


def _row(name: str, num_runs: int, found: list[str]) -> dict[str, Any]:
    row = {"run": name, "runs": num_runs, "findings": len(found), "which": ", ".join(sorted(set(found)))}
    print(row, file=sys.stderr, flush=True)
    return row | {"which": row["which"].replace("_", " ")}


if __name__ == "__main__":
    main()
