"""Recompute a spike from its dump with the same batch, weights and RNG state, and per-block gradient norms."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from recipes.build import Run
from recipes.checkpoint.layout import is_shard
from recipes.checkpoint.saved_tensor import open_tensors
from recipes.checkpoint.shards import load_module
from recipes.errors import ConfigError
from recipes.files import write_atomically
from recipes.mode.load import load_task, restoring
from recipes.run_folder import SPIKES_FOLDER, claim_output
from recipes.runtime.console import LOGGER
from recipes.strategy.torch_native import global_norm
from recipes.task.base import TrainingTask

SHOWN_SAMPLES = 5


def replay(run: Run, *, step: Annotated[int, ">= 1"] | None) -> int:
    """Recompute a step, print it next to the recorded values, and write `replay.json` into the dump.

    Args:
        run: A run with a checkpoint; the dump is in the folder of the run that wrote it.
        step: Optimizer step, counted from 1; None is the newest dump.

    Returns:
        The exit code, 0.

    Raises:
        ConfigError: There is no dump of that step, it cannot be written to, or there is no checkpoint.
    """
    task, checkpoint = load_task(run, "trained")
    dump = _find_dump(checkpoint.parents[1] / SPIKES_FOLDER, step)
    claim_output(dump, "resume")
    with restoring(run, dump):
        result = _replay(run, task, dump, checkpoint)
    write_atomically(dump / "replay.json", json.dumps(result, indent=2) + "\n")
    return 0


def _replay(run: Run, task: TrainingTask, dump: Path, checkpoint: Path) -> dict[str, Any]:
    """Recompute the step of a dump and print it; return the values."""
    recorded = json.loads((dump / "spike.json").read_text(encoding="utf-8"))
    weights = dump / "weights"
    if weights.is_dir():
        files = [path for path in sorted(weights.iterdir()) if is_shard(path.name)]
        saved = open_tensors(files, are_checked=False)  # a step may begin with weights that are not finite
        load_module(
            task,
            {
                name: saved.get(name) or _tied_tensor(task, name, saved)
                for name in task.state_dict()
                if name not in task.frozen_names()
            },
        )
    else:
        LOGGER.info(
            "The dump contains no weights: they had already changed when it was written;"
            f" using those of {checkpoint.name}"
        )
    rank_states = [torch.load(path, map_location="cpu", weights_only=True) for path in sorted(dump.glob("rank_*.pt"))]
    loss, norm_by_block, norm = _recompute(run, task, rank_states)
    _print(recorded, dump, loss, norm, norm_by_block)
    return {"loss": _finite(loss), "grad_norm": _finite(norm), "grad_norms": norm_by_block}


def _find_dump(parent: Path, step: int | None) -> Path:
    """Return the folder of a step's dump."""
    dumps = [path for path in sorted(parent.glob("step_*")) if path.name.removeprefix("step_").isdecimal()]
    wanted = dumps[-1:] if step is None else [parent / f"step_{step:07d}"]
    if wanted and (wanted[0] / "spike.json").is_file():
        return wanted[0]
    steps = [str(int(path.name.removeprefix("step_"))) for path in dumps]
    setting = f"mode.step={'null' if step is None else step}"
    if not steps:
        raise ConfigError(setting, f"{parent} contains no dump of a spike", "resume=<a run that had a spike>")
    raise ConfigError(
        setting,
        f"{parent} contains no dump of that step, only of {', '.join(steps)}",
        f"mode.step={steps[-1]}",
    )


def _tied_tensor(task: TrainingTask, name: str, saved: Any) -> Any:
    """Return the saved tensor of the parameter that `name` is tied to."""
    parameters = dict(task.named_parameters(remove_duplicate=False))
    return next(
        saved[other] for other, parameter in parameters.items() if parameter is parameters[name] and other in saved
    )


def _recompute(
    run: Run, task: TrainingTask, rank_states: list[dict[str, Any]]
) -> tuple[float, dict[str, float | None], float]:
    """Return loss, gradient norm by block and global norm, from the micro-batches of all ranks in turn."""
    device = run.trainer.strategy.root_device
    task.train()
    total = 0.0
    for state in rank_states:
        for batch, random_state in zip(state["batches"], state["random"], strict=True):
            torch.set_rng_state(random_state["torch"])
            if random_state["cuda"] is not None and device.type == "cuda":
                torch.cuda.set_rng_state(random_state["cuda"])
            batch = {key: _move(value, device) for key, value in batch.items()}
            with run.trainer.precision_plugin.forward_context():
                objective_sum, loss_sum = task.objective_sum(batch)
            objective = objective_sum / batch["num_targets"]
            objective.backward()  # type: ignore[no-untyped-call]
            total += float(loss_sum.detach() / batch["num_targets"])
    grads = {name: parameter.grad for name, parameter in task.named_parameters() if parameter.grad is not None}
    grads_by_block: dict[str, list[Tensor]] = {}
    for name, grad in grads.items():
        grads_by_block.setdefault(_block_name(name), []).append(grad)
    norm_by_block = {block: _finite(float(global_norm(block_grads))) for block, block_grads in grads_by_block.items()}
    return total, norm_by_block, float(global_norm([*grads.values()]))


def _block_name(parameter: str) -> str:
    """Map `model.blocks.3.mlp.weight` to `blocks.3`."""
    parts = parameter.removeprefix("model.").split(".")
    return ".".join(parts[:2]) if len(parts) > 1 and parts[1].isdigit() else ".".join(parts[:-1])


def _print(
    recorded: dict[str, Any],
    dump: Path,
    loss: float,
    norm: float,
    norm_by_block: dict[str, float | None],
) -> None:
    before = f"loss {_number(recorded['loss'])}, gradient norm {_number(recorded['grad_norm'])}"
    now = f"loss {loss:.6g}, gradient norm {norm:.6g}"
    LOGGER.info(f"{dump}: recorded {before}; recomputed {now}")
    for block, value in norm_by_block.items():
        weight = recorded["weight_norms"].get(block)
        LOGGER.info(f"  {block:<16} gradient {_number(value):>10}   weights {_number(weight):>10}")
    lines = (dump / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    for line in lines[:SHOWN_SAMPLES]:
        sample = json.loads(line)
        documents = ", ".join(
            f"{document['name']} from token {document['first_token']}" for document in sample.get("documents", [])
        )
        source = f"sample {sample['sample']}" if "sample" in sample else f"rank {sample['rank']}"
        LOGGER.info(f"  loss {_number(sample['loss']):>10}   {source} {documents}")
        if "text" in sample:
            LOGGER.info(f"    {sample['text'][:100]!r}")


def _move(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6g}"


def _finite(value: float) -> float | None:
    """Return None for NaN and inf, which JSON does not have."""
    return value if math.isfinite(value) else None
