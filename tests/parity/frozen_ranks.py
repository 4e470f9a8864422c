"""Train with frozen parameters and resume, case by case, as one rank: python frozen_ranks.py <cases> <results>.

A case is trained to its last step, which saves a checkpoint in the middle, then again from that one. The result has the
rows of both, the names of what is trained, and those of the saved weights that are not as they were initialized; of the
first training also how often each block was called, if the case has `counts_calls`, and the number of compiled graphs.
"""

import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(folder) for folder in Path(__file__).parents[:3]]

import recipes  # noqa: E402, F401  # isort: skip  # before Lightning, as in conftest.py

import torch  # noqa: E402
import torch._dynamo  # noqa: E402
from lightning.pytorch.callbacks import Callback  # noqa: E402
from run_cases import run_all  # noqa: E402
from support import composed_config, read_metrics, resolved  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from recipes.build import build  # noqa: E402
from recipes.checkpoint.layout import is_shard  # noqa: E402
from recipes.checkpoint.saved_tensor import open_tensors  # noqa: E402
from recipes.model.weights import initialize  # noqa: E402


class BlockCalls(Callback):
    """Counts how often each block of a model is called; recomputing one is a call."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.numbers = [0 for _ in pl_module.model.blocks]
        for index, block in enumerate(pl_module.model.blocks):
            # what a block calls first: recomputation stops where it has what it needs
            block.attention_norm.register_forward_hook(lambda *_, index=index: self._add(index))

    def _add(self, index: int) -> None:
        self.numbers[index] += 1


def train(case: dict[str, Any], folder: Path, *more: str, callbacks: Sequence[Callback] = ()) -> Any:
    """Train; return the run and its rows."""
    folder.mkdir(exist_ok=True)
    config = composed_config(*case["overrides"], *more) | {"data": case["data"]}
    run = build(resolved(config, folder))
    run.trainer.callbacks += callbacks  # type: ignore[attr-defined]
    run.trainer.fit(run.task, datamodule=run.data, ckpt_path=run.checkpoint, weights_only=True)
    run.trainer.strategy.barrier()
    return run, read_metrics(folder) if run.trainer.is_global_zero else []


def find_changed(checkpoint: Path, config: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the names of the saved weights that differ from the initial ones, and of those with optimizer state."""
    whole = resolved(config, checkpoint).make_model()
    initialize(whole, seed=config["seed"])
    saved = open_tensors([path for path in checkpoint.iterdir() if is_shard(path)])
    names = {name for name in saved if name.startswith("model.")}
    own = {name: tensor for name, tensor in whole.state_dict().items() if f"model.{name}" in names}
    tied = {f"model.{name}" for name in whole.state_dict()} - names
    assert tied <= {"model.head.weight"}, tied
    changed = [name for name, tensor in own.items() if not torch.equal(saved[f"model.{name}"].read(), tensor)]
    with_state = {name.split("/model.")[1] for name in saved if name.startswith("optimizer/")}
    return sorted(changed), sorted(with_state)


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train without interruption, then resume from the middle checkpoint."""
    torch._dynamo.reset()  # else graphs of the case before are used again
    calls, num_graphs = BlockCalls(), counters["stats"]["unique_graphs"]
    run, rows = train(case, folder / "uninterrupted", callbacks=[calls] if "counts_calls" in case else [])
    num_graphs = counters["stats"]["unique_graphs"] - num_graphs
    names = [name.removeprefix("model.") for name, p in run.task.named_parameters() if p.requires_grad]
    del run
    gc.collect()
    checkpoints = folder / "uninterrupted/checkpoints"
    again, resumed = train(case, folder / "resumed", f"resume={checkpoints / 'step_0000002.ckpt'}")
    config = composed_config(*case["overrides"])
    is_first = again.trainer.is_global_zero
    changed, with_state = find_changed(checkpoints / "step_0000004.ckpt", config) if is_first else ([], [])
    return {
        "rows": rows,
        "resumed": resumed,
        "changed": changed,
        "with_state": with_state,
        "trained_here": names,
        "calls": calls.numbers,
        "num_graphs": num_graphs,
    }


if __name__ == "__main__":
    run_all(run_case)
