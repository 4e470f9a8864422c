"""One rank that runs many cases in one process group: python run_cases.py <cases.json> <results.json>.

A case is the words of a command line and a data node that takes the place of the composed one; its result is the
rows of metrics.csv.
"""

import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent)]

from support import composed_config, read_metrics  # noqa: E402

from recipes.build import build  # noqa: E402


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train; the rows of its metrics."""
    config = composed_config(*case["words"]) | {"data": case["data"]}
    run = build(config, folder, [])
    run.trainer.fit(run.task, datamodule=run.data, ckpt_path=run.checkpoint, weights_only=True)
    run.trainer.strategy.barrier()
    return {"rows": read_metrics(folder) if run.trainer.is_global_zero else []}


def main() -> None:
    torch.set_num_threads(1)
    cases, results_file = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    results: dict[str, Any] = {}
    for name, case in cases.items():
        shared = Path(f"{results_file}.{len(results)}")  # the same folder on every rank
        shared.mkdir(exist_ok=True)
        try:
            results[name] = run_case(case, shared)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
            print(name, traceback.format_exc(), file=sys.stderr, flush=True)
        gc.collect()
    if os.environ.get("RANK", "0") == "0":
        results_file.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
