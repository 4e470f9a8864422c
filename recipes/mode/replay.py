"""A step out of line made again from its evidence: the same batch, weights and random numbers, with every norm."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.build import Run
from recipes.checkpoint.layout import is_shard
from recipes.checkpoint.shard_file import open_tensors
from recipes.checkpoint.shards import load_module
from recipes.errors import ConfigError
from recipes.mode.load import load_task
from recipes.runtime.console import LOGGER
from recipes.strategy.torch_native import global_norm
from recipes.task.base import TrainingTask

FOLDER = "spikes"
SHOWN_SAMPLES = 5


def replay(run: Run, *, step: int | None) -> int:
    """Recompute a step and print it beside what was recorded; also to `replay.json` in its folder.

    Args:
        run: With a checkpoint: its run has the evidence.
        step: Optimizer steps completed with it; None: the newest there is.

    Raises:
        ConfigError: There is no evidence of that step.
    """
    task, checkpoint = load_task(run, "trained")
    folder = _evidence(checkpoint.parents[1] / FOLDER, step)
    recorded = json.loads((folder / "spike.json").read_text())
    weights = folder / "weights"
    if weights.is_dir():
        files = [path for path in sorted(weights.iterdir()) if is_shard(path.name)]
        saved = open_tensors(files)
        load_module(
            task, {name: saved.get(name) or _other(task, name, saved) for name in task.state_dict()}
        )
    else:
        LOGGER.info(
            f"Its weights were not kept, as they had changed: those of {checkpoint.name} are taken"
        )
    ranks = [
        torch.load(path, map_location="cpu", weights_only=True)
        for path in sorted(folder.glob("rank_*.pt"))
    ]
    loss, by_block, norm = _compute(run, task, ranks)
    _print(recorded, folder, loss, norm, by_block)
    result = {"loss": _finite(loss), "grad_norm": _finite(norm), "grad_norms": by_block}
    (folder / "replay.json").write_text(json.dumps(result, indent=2) + "\n")
    return 0


def _evidence(parent: Path, step: int | None) -> Path:
    found = sorted(parent.glob("step_*"))
    wanted = found[-1:] if step is None else [parent / f"step_{step:07d}"]
    if not wanted or not (wanted[0] / "spike.json").is_file():
        have = ", ".join(str(int(path.name.removeprefix("step_"))) for path in found)
        raise ConfigError(
            f"mode.step={step if step is not None else 'null'}",
            f"there is no evidence of it in {parent}" + (f", but of {have}" if have else ""),
            f"mode.step={have.split(', ')[-1]}" if have else "resume=<a run that has met a spike>",
        )
    return wanted[0]


def _other(task: TrainingTask, name: str, saved: Any) -> Any:
    """The tensor that a tied name stands for."""
    own = dict(task.named_parameters(remove_duplicate=False))
    return next(saved[other] for other, one in own.items() if one is own[name] and other in saved)


def _compute(
    run: Run, task: TrainingTask, ranks: list[dict[str, Any]]
) -> tuple[float, dict[str, float | None], float]:
    """Loss, gradient norm by block, global norm: all ranks' micro-batches one after the other."""
    device = run.trainer.strategy.root_device
    task.train()
    total = 0.0
    for of_rank in ranks:
        for batch, random in zip(of_rank["batches"], of_rank["random"], strict=True):
            torch.set_rng_state(random["torch"])
            if random["cuda"] is not None and device.type == "cuda":
                torch.cuda.set_rng_state(random["cuda"])
            batch = {key: _to(value, device) for key, value in batch.items()}
            with run.trainer.precision_plugin.forward_context():
                objective_sum, loss_sum = task.objective_sum(batch)
            objective = objective_sum / batch["num_targets"]
            objective.backward()  # type: ignore[no-untyped-call]
            total += float(loss_sum.detach() / batch["num_targets"])
    named = [(name, one.grad) for name, one in task.named_parameters() if one.grad is not None]
    blocks: dict[str, list[Tensor]] = {}
    for name, grad in named:
        blocks.setdefault(_block(name), []).append(grad)
    by_block = {block: _finite(float(global_norm(grads))) for block, grads in blocks.items()}
    return total, by_block, float(global_norm([grad for _, grad in named]))


def _block(name: str) -> str:
    """`model.blocks.3.mlp.weight` -> `blocks.3`."""
    parts = name.removeprefix("model.").split(".")
    return ".".join(parts[:2]) if len(parts) > 1 and parts[1].isdigit() else ".".join(parts[:-1])


def _print(
    recorded: dict[str, Any],
    folder: Path,
    loss: float,
    norm: float,
    by_block: dict[str, float | None],
) -> None:
    was = f"loss {_shown(recorded['loss'])}, gradient norm {_shown(recorded['grad_norm'])}"
    LOGGER.info(f"{folder}: recorded {was}; again: loss {loss:.6g}, gradient norm {norm:.6g}")
    for block, value in by_block.items():
        weight = recorded["weight_norms"].get(block)
        LOGGER.info(f"  {block:<16} gradient {_shown(value):>10}   weights {_shown(weight):>10}")
    lines = (folder / "samples.jsonl").read_text().splitlines()
    for line in lines[:SHOWN_SAMPLES]:
        sample = json.loads(line)
        where = ", ".join(
            f"{one['name']} from token {one['first_token']}" for one in sample.get("documents", [])
        )
        place = f"sample {sample['sample']}" if "sample" in sample else f"rank {sample['rank']}"
        LOGGER.info(f"  loss {_shown(sample['loss']):>10}   {place} {where}")
        if "text" in sample:
            LOGGER.info(f"    {sample['text'][:100]!r}")


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _shown(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6g}"


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
