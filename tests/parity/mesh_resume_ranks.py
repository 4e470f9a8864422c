"""Train, and save the state that was just loaded, as one rank: python mesh_resume_ranks.py <cases.json> <results.json>.

The result is the metric rows and, for a resumed run, the tensors that differ between the loaded checkpoint and the one
saved again before the first step.
"""

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(folder) for folder in Path(__file__).parents[:3]]

import recipes  # noqa: E402, F401  # isort: skip  # before Lightning, as in conftest.py

import torch  # noqa: E402
from lightning.pytorch.callbacks import Callback  # noqa: E402
from run_cases import run_all  # noqa: E402
from support import composed_config, read_metrics, resolved  # noqa: E402

from recipes.build import build  # noqa: E402
from recipes.checkpoint.layout import are_equal, is_shard, merge_optimizer_values  # noqa: E402
from recipes.checkpoint.saved_tensor import SavedTensor, open_tensors  # noqa: E402


class SavesAgain(Callback):
    """Saves a checkpoint of the state that was just loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:  # the first hook after the task has resumed
        if self.path.exists():
            return
        trainer.save_checkpoint(self.path)
        outcome = trainer.strategy.checkpoint_io.writer.poll(wait=True)
        assert outcome is not None
        assert outcome.is_valid, outcome


def open_checkpoint(folder: Path) -> tuple[dict[str, SavedTensor], list[dict[str, Any]]]:
    """Return the tensors of a checkpoint, and what the optimizer of each rank kept beside them.

    Without RNG states, which are specific to a rank, and without the states of callbacks.
    """
    found = open_tensors(path for path in sorted(folder.iterdir()) if is_shard(path.name))
    values = {int(name.partition("/")[2]): tensor for name, tensor in found.items() if name.startswith("values/")}
    ranks = {int(name.split("/")[1]) for name in found if name.startswith("rng/")}
    checkpoint = {"values": values, "rng": [{} for _ in ranks]}
    kept = [merge_optimizer_values(checkpoint, rank=rank, is_same_mesh=True) for rank in sorted(ranks)]
    return {name: tensor for name, tensor in found.items() if not name.startswith(("rng/", "values/"))}, kept


def compare(first: Path, second: Path) -> list[str]:
    """Return the names of tensors and values that differ in any bit or are missing from one checkpoint."""
    (one, kept), (other, kept_again) = open_checkpoint(first), open_checkpoint(second)
    differing = set(one) ^ set(other)
    if len(kept) == len(kept_again):  # else on another mesh, whose ranks hold other parameters
        differing |= {
            f"{name} of rank {rank}"
            for rank, (before, after) in enumerate(zip(kept, kept_again, strict=True))
            for name in before
            if not are_equal(before[name], after[name])
        }
    return sorted(
        differing | {name for name in set(one) & set(other) if not torch.equal(one[name].read(), other[name].read())}
    )


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    config = composed_config(*case["overrides"]) | {"data": case["data"]}
    config |= {"optimizer": case["optimizer"]} if "optimizer" in case else {}
    run = build(resolved(config, folder))
    again = folder / "again.ckpt"
    if run.checkpoint is not None:
        run.trainer.callbacks.append(SavesAgain(again))  # type: ignore[attr-defined]
    run.trainer.fit(run.task, datamodule=run.data, ckpt_path=run.checkpoint, weights_only=True)
    run.trainer.strategy.barrier()
    if not run.trainer.is_global_zero:
        return {}
    differing = [] if run.checkpoint is None else compare(run.checkpoint, again)
    return {"rows": read_metrics(folder), "differing": differing}


if __name__ == "__main__":
    run_all(run_case)
