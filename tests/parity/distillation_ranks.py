"""Distil a teacher case by case, as one rank, and look after it: python distillation_ranks.py <cases> <results>.

A case is a list of overrides and a data node that replaces the composed one.
"""

import gc
import hashlib
import sys
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(folder) for folder in Path(__file__).parents[:3]]

import recipes  # noqa: E402, F401  # isort: skip  # before Lightning, as in conftest.py

from lightning.pytorch.callbacks import Callback  # noqa: E402
from run_cases import run_all  # noqa: E402
from support import composed_config, read_metrics, resolved  # noqa: E402

from recipes.build import build  # noqa: E402
from recipes.checkpoint.saved_tensor import open_tensors  # noqa: E402
from recipes.parallel.placement import local  # noqa: E402


class Watch(Callback):
    """Looks at the teacher before the first and after the last step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._look(pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._look(pl_module)

    def _look(self, task: Any) -> None:
        teacher = task.frozen_models["teacher"]
        digest = hashlib.sha256()
        parts = [local(tensor.detach()) for tensor in (*teacher.parameters(), *teacher.buffers())]
        for part in parts:
            digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
        self.seen.append(
            {
                "hash": digest.hexdigest(),
                "held_bytes": sum(part.nbytes for part in parts),
                "is_frozen": not any(p.requires_grad or p.grad is not None for p in teacher.parameters()),
                "in_eval_mode": not any(module.training for module in teacher.modules()),
                "in_state": [name for name in task.state_dict() if "teacher" in name],
                "num_optimized": len(task.optimized_parameters) - len(list(task.model.parameters())),
            }
        )


def train(case: dict[str, Any], folder: Path, *more: str) -> tuple[list[dict[str, float]], Watch]:
    """Train; return the metric rows and what the callback saw."""
    folder.mkdir(exist_ok=True)
    run = build(resolved(composed_config(*case["overrides"], *more) | {"data": case["data"]}, folder))
    watch = Watch()
    run.trainer.callbacks.append(watch)  # type: ignore[attr-defined]
    run.trainer.fit(run.task, datamodule=run.data, ckpt_path=run.checkpoint, weights_only=True)
    run.trainer.strategy.barrier()
    return (read_metrics(folder) if run.trainer.is_global_zero else []), watch


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train to the end; then again from the checkpoint in the middle, if there is one, beside both teachers."""
    rows, watch = train(case, folder / "whole")
    checkpoint = folder / f"whole/checkpoints/step_{case['middle']:07d}.ckpt"
    found: dict[str, Any] = {"rows": rows, "seen": watch.seen}
    if not checkpoint.is_dir():
        return found
    found["saved"] = sorted(open_tensors(checkpoint.glob("rank_*.safetensors")))
    gc.collect()
    found["resumed"], _ = train(case, folder / "resumed", f"resume={checkpoint}")
    gc.collect()
    try:
        train(case, folder / "other", f"resume={checkpoint}", f"teacher.pretrained={case['other']}")
    except Exception as error:
        found["rejected"] = str(error)
    return found


if __name__ == "__main__":
    run_all(run_case)
