"""Run many cases in one process group, as one rank: python run_cases.py <cases.json> <results.json>.

A case is a list of overrides and nodes of data, loss and task that replace the composed ones; its result is the rows of
metrics.csv and, if `count` is set, the bytes held by this rank. `overflow` selects a step and a rank,
`tensors` the tensors of the last checkpoint whose norms are in the result. If `gradients` is set, those of the first
step are in it, of every parameter, as far as the engine has them at the parameters.
"""

import contextlib
import gc
import json
import os
import pickle
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

sys.path[:0] = [str(folder) for folder in Path(__file__).parents[:3]]

from recipes.build import build  # noqa: E402  # isort: skip  # before Lightning, as in conftest.py

import lightning  # noqa: E402
from held_bytes import HeldBytes  # noqa: E402
from support import COMPOSED, OverflowAt, composed_config, read_metrics, resolved  # noqa: E402

from recipes.checkpoint.saved_tensor import open_tensors  # noqa: E402
from recipes.model.init import unsharded_shape  # noqa: E402
from recipes.strategy.deepspeed import strategy  # noqa: E402
from recipes.strategy.deepspeed.partition import gather_in_compute_dtype  # noqa: E402


class FirstGradients(lightning.Callback):
    """Keeps the gradients of the first step, before they are clipped."""

    def __init__(self) -> None:
        self.of: dict[str, list[float]] = {}

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: torch.optim.Optimizer) -> None:
        if trainer.global_step == 0:
            for name, parameter in module.model.named_parameters():
                if parameter.grad is not None:
                    whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
                    self.of[name] = whole.flatten().tolist()


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train; return the metric rows."""
    config = composed_config(*case["overrides"]) | {"data": case["data"]}
    config |= {name: case[name] for name in ("loss", "task") if name in case}
    run = build(resolved(config, folder))
    if "gathers_in_float32" in case:
        strategy.gather_in_compute_dtype = lambda *_: None
    else:
        strategy.gather_in_compute_dtype = gather_in_compute_dtype
    counter = HeldBytes()
    if "count" in case:
        run.trainer.callbacks.append(counter)  # type: ignore[attr-defined]
    gradients = FirstGradients()
    if "gradients" in case:
        run.trainer.callbacks.append(gradients)  # type: ignore[attr-defined]
    if "overflow" in case:
        run.trainer.callbacks.insert(0, OverflowAt(**case["overflow"]))  # type: ignore[attr-defined]
    run.trainer.fit(run.task, datamodule=run.data, ckpt_path=run.checkpoint, weights_only=True)
    run.trainer.strategy.barrier()
    num_parameters = sum(unsharded_shape(weight).numel() for weight in run.task.parameters())
    saved = open_tensors([*folder.glob("checkpoints/last/*.safetensors")]) if "tensors" in case else {}
    return {
        "tensors": {
            name: tensor.read().double().norm().item()
            for name, tensor in saved.items()
            if re.search(case["tensors"], name)
        },
        "rows": read_metrics(folder) if run.trainer.is_global_zero else [],
        "held_bytes": counter.most,
        "num_parameters": num_parameters,
        "gradients": gradients.of,
    }


def compose_all(overrides: Sequence[Sequence[str]], file: Path) -> None:
    """Compose the configs of all cases, each on one rank, and give them to the others: a quarter of a case's time."""
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    for typed in overrides[rank::num_ranks]:
        with contextlib.suppress(AssertionError):  # a mistake is raised again by the case, which reports it
            COMPOSED[tuple(typed)] = pickle.dumps(composed_config(*typed))
    mine = Path(f"{file}.{rank}")
    part = Path(f"{mine}.part")  # with the rank in its name
    part.write_bytes(pickle.dumps(COMPOSED))
    part.rename(mine)
    for other in range(num_ranks):
        while not (theirs := Path(f"{file}.{other}")).exists():
            time.sleep(0.01)
        COMPOSED.update(pickle.loads(theirs.read_bytes()))


def run_all(run_case: Callable[[dict[str, Any], Path], dict[str, Any]]) -> None:
    """Run every case in the file given on the command line, each in its own folder next to the results."""
    torch.set_num_threads(1)
    cases, results_file = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    results: dict[str, Any] = {}
    compose_all([case["overrides"] for case in cases.values() if "overrides" in case], Path(f"{results_file}.composed"))
    for name, case in cases.items():
        shared = Path(f"{results_file}.{len(results)}")  # the same folder on every rank
        shared.mkdir(exist_ok=True)
        try:
            results[name] = run_case(case, shared)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
            print(name, traceback.format_exc(), file=sys.stderr, flush=True)
        gc.collect()
        gc.freeze()  # what is left was imported: to go through it again would take a fifth of the time of each case
    if os.environ.get("RANK", "0") == "0":
        results_file.write_text(json.dumps(results))


if __name__ == "__main__":
    run_all(run_case)
