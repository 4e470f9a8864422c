"""Write a debug dump of a spike: its batch, losses, weights and context. Costs one extra forward pass."""

import json
import logging
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from ..events import finite
from ..files import replacing, tolerating, write_atomically
from ..grad_norm.callback import norms_by_block
from ..logged_step import run_folder
from ..profiler_hooks import get_profiler
from ..protocols import SupportsSampleLosses, SupportsSavedWeights
from ..ranks import gather_by_samples, gather_objects
from .monitor import SpikeMonitor, Verdict
from .train_state import rng_state

log = logging.getLogger("lightning_recipes")
FOLDER = "spikes"


@dataclass(frozen=True)
class _MicroBatch:
    step: int  # optimizer step it belongs to
    batch: Any
    rng_state: dict[str, Any]  # before the forward pass
    position: int | None  # of the data module when the batch was fetched


class SpikeDump:
    """Keeps the micro-batches of the last two steps and writes those of a spike to `spikes/step_N`.

    It keeps two steps because on a GPU a step is checked one step late. The folder contains `spike.json` (values,
    alarms, windows), `samples.jsonl` (largest losses first), a `rank_N.pt` per rank (batches, losses, RNG states) and,
    if they have not changed since the step, `weights/`.

    A module may provide `recipes_sample_losses(batch) -> [B]` and `recipes_save_weights(folder)`, and a data module
    `samples_of_step(position) -> list of dicts`, each with `rank`, `micro_batch` and `row` plus a description.

    Args:
        max_folders: Maximum dumps per run; later spikes are only logged. 0 writes none.

    Attributes:
        num_folders: Dumps written so far, resumes included.
    """

    def __init__(self, *, max_folders: int) -> None:
        self.num_folders = 0
        self._max_folders = max_folders
        self._newest: list[_MicroBatch] = []

    def record(self, trainer: Trainer, batch: Any) -> None:
        """Keep a reference to a micro-batch and a copy of the RNG states; call it before the forward pass."""
        if self._max_folders <= self.num_folders:
            return
        step = trainer.global_step + 1
        self._newest = [part for part in self._newest if part.step in (step, step - 1)]
        position = getattr(getattr(trainer, "datamodule", None), "position", None)
        states = rng_state()
        # only states that are tensors, so that `torch.load(weights_only=True)` can read them
        tensor_states = {device: states[device] for device in ("torch", "cuda")}
        self._newest.append(_MicroBatch(step, batch, tensor_states, position))

    def clear(self) -> None:
        """Drop the micro-batches after a rollback: step numbers repeat."""
        self._newest = []

    def write(self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict, monitor: SpikeMonitor) -> None:
        """Write the dump of a step unless the limit is reached; a collective, so call it on every rank.

        A full disk is logged and does not end the run.

        Args:
            trainer: The trainer.
            pl_module: The module.
            verdict: Verdict on the step.
            monitor: Monitor whose windows are written.
        """
        parent = run_folder(trainer)
        if parent is None or self.num_folders >= self._max_folders:
            return
        self.num_folders += 1
        # SpeedMonitor excludes this time, and waits for the device first: not where nothing is written
        with get_profiler(trainer).profile("spike"):
            self._write(trainer, pl_module, verdict, monitor, parent / FOLDER)

    def _write(
        self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict, monitor: SpikeMonitor, parent: Path
    ) -> None:
        step = verdict.measurement.step
        folder = parent / f"step_{step:07d}"
        if trainer.is_global_zero:
            shutil.rmtree(folder, ignore_errors=True)  # left over from a rolled-back step with this number
        folder = Path(trainer.strategy.broadcast(str(folder)))
        parts = [part for part in self._newest if part.step == step]
        losses = [_get_sample_losses(trainer, pl_module, part.batch) for part in parts]
        is_complete = False
        try:
            self._write_rank(trainer, pl_module, folder, parts, losses, verdict)
            is_complete = True
        # a full disk or a batch that cannot be pickled must not end the run or leave other ranks waiting below
        except Exception as error:
            log.warning(f"{folder} could not be written: {type(error).__name__}: {error}. The run goes on")
        if not all(gather_objects(is_complete)) and trainer.is_global_zero:
            shutil.rmtree(folder / "weights", ignore_errors=True)  # `mode=replay` needs those of all ranks
        losses_by_rank = gather_by_samples([None if loss is None else loss.tolist() for loss in losses], trainer)
        weight_norms = norms_by_block(pl_module)
        if trainer.is_global_zero:
            content = _describe(trainer, verdict, monitor) | {"weight_norms": weight_norms}
            with tolerating(folder / "spike.json"):
                folder.mkdir(parents=True, exist_ok=True)
                _write_samples(folder / "samples.jsonl", trainer, parts, losses_by_rank)
                # last: a folder without it is no dump
                write_atomically(folder / "spike.json", json.dumps(content, indent=2) + "\n")
                log.warning(f"Step {step}: its batch and losses are in {folder}")

    @staticmethod
    def _write_rank(
        trainer: Trainer,
        pl_module: LightningModule,
        folder: Path,
        parts: list[_MicroBatch],
        losses: list[Tensor | None],
        verdict: Verdict,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "batches": [_to_host(part.batch) for part in parts],
            "losses": losses,
            "random": [part.rng_state for part in parts],
        }
        with replacing(folder / f"rank_{trainer.global_rank:05d}.pt") as unfinished:
            torch.save(content, unfinished)
        # on a GPU the next step has already run; if it was applied, the weights are no longer those of this step
        is_unchanged = verdict.skipped and verdict.measurement.step == trainer.global_step
        if isinstance(pl_module, SupportsSavedWeights) and is_unchanged:
            pl_module.recipes_save_weights(folder / "weights")


def _describe(trainer: Trainer, verdict: Verdict, monitor: SpikeMonitor) -> dict[str, Any]:
    measurement = verdict.measurement
    return {
        "step": measurement.step,
        "loss": finite(measurement.loss),
        "grad_norm": None if measurement.norm is None else finite(measurement.norm),
        "skipped": verdict.skipped,
        "alarms": {
            name: {key: value if isinstance(value, str) else finite(value) for key, value in asdict(alarm).items()}
            for name, alarm in verdict.alarms.items()
        },
        "windows": {name: detector.window for name, detector in monitor.detectors.items()},
        "learning_rates": [float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups],
        "loss_scale": getattr(trainer.strategy, "current_loss_scale", None),
        "world_size": trainer.world_size,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
    }


def _write_samples(
    path: Path,
    trainer: Trainer,
    parts: Sequence[_MicroBatch],
    losses_by_rank: Sequence[Sequence[list[float] | None]],
) -> None:
    """Write one line per sample, the largest losses first.

    Args:
        path: File to write.
        trainer: The trainer.
        parts: This rank's micro-batches of the step.
        losses_by_rank: Sample losses by data rank and micro-batch; None if unknown.
    """
    describe = getattr(getattr(trainer, "datamodule", None), "samples_of_step", None)
    position = parts[-1].position if parts else None
    if callable(describe) and position is not None:
        samples = describe(position)
    else:
        samples = [
            {"rank": rank, "micro_batch": number, "row": row}
            for rank, of_rank in enumerate(losses_by_rank)
            for number, losses in enumerate(of_rank)
            for row in range(len(losses or []))
        ]
    for sample in samples:
        rank, number = sample["rank"], sample["micro_batch"]
        losses = losses_by_rank[rank][number] if rank < len(losses_by_rank) else None
        sample["loss"] = None if losses is None else finite(losses[sample["row"]])
    # NaN and inf, which are None here, come first
    samples.sort(key=lambda sample: -math.inf if sample["loss"] is None else -sample["loss"])
    write_atomically(path, "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples))


@torch.no_grad()
def _get_sample_losses(trainer: Trainer, pl_module: LightningModule, batch: Any) -> Tensor | None:
    """Compute a micro-batch's sample losses without dropout, [B] float32 on the host; None if unsupported."""
    if not isinstance(pl_module, SupportsSampleLosses):
        return None
    modes = [(module, module.training) for module in pl_module.modules()]
    pl_module.eval()
    try:
        # FSDP all-gathers shards in the compute dtype: outside this context the dtypes would not match
        with trainer.precision_plugin.forward_context():
            losses = pl_module.recipes_sample_losses(batch)
        return losses.detach().float().cpu()
    finally:
        for module, training in modes:
            module.training = training


def _to_host(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.detach().cpu()
    if isinstance(batch, dict):
        return {key: _to_host(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [_to_host(value) for value in batch]
    return batch
