"""What a step out of line was made of, in a folder a person can open. A forward pass where there is something."""

import contextlib
import json
import logging
import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from ..events import finite
from ..grad_norm.by_block import norms_by_block
from ..logged_step import run_folder
from .monitor import SpikeMonitor, Verdict
from .train_state import rng_state

log = logging.getLogger("lightning_recipes")
FOLDER = "spikes"


@dataclass(frozen=True)
class _MicroBatch:
    step: int  # that it is part of
    batch: Any
    random: dict[str, Any]  # before the forward pass
    position: int | None  # of the data, when it was handed out


class SpikeDump:
    """Remembers the micro-batches of the newest two steps, and writes them down.

    A module may offer `sample_losses(batch) -> [B]` and `save_weights(folder)`, a data module
    `samples_of_step(position) -> list of dicts`, each with `rank`, `micro_batch` and `row` beside what it is.

    Args:
        max_folders: So many spikes leave a folder, later ones a line and an event.
    """

    def __init__(self, *, max_folders: int) -> None:
        self.num_folders = 0
        self._max_folders = max_folders
        self._newest: list[_MicroBatch] = []

    def note(self, trainer: Trainer, batch: Any) -> None:
        """At the start of every micro-batch. Keeps references and copies of random states."""
        if self._max_folders <= self.num_folders:
            return
        step = trainer.global_step + 1
        self._newest = [one for one in self._newest if one.step in (step, step - 1)]
        position = getattr(getattr(trainer, "datamodule", None), "position", None)
        random = rng_state()
        draws = {
            device: random[device] for device in ("torch", "cuda")
        }  # tensors: they load as plain data
        self._newest.append(_MicroBatch(step, batch, draws, position))

    def forget(self) -> None:
        """After a rollback: the next steps have the numbers of these."""
        self._newest = []

    def write(
        self, trainer: Trainer, pl_module: LightningModule, verdict: Verdict, watch: SpikeMonitor
    ) -> None:
        """A folder for a step, on every rank; none where there are enough of them."""
        parent = run_folder(trainer)
        if parent is None or self.num_folders >= self._max_folders:
            return
        self.num_folders += 1
        folder = parent / FOLDER / f"step_{verdict.reading.step:07d}"
        if trainer.is_global_zero:
            shutil.rmtree(folder, ignore_errors=True)  # of a step of that number which was undone
        folder = Path(trainer.strategy.broadcast(str(folder)))
        parts = [one for one in self._newest if one.step == verdict.reading.step]
        losses = [_sample_losses(trainer, pl_module, one.batch) for one in parts]
        try:
            self._write_rank(trainer, pl_module, folder, parts, losses, verdict)
        except (
            OSError
        ) as error:  # it is no reason to end a run, nor to leave the other ranks waiting
            log.warning(f"{folder} could not be written: {error.strerror}")
        of_ranks = _gather([None if loss is None else loss.tolist() for loss in losses])
        block_norms = norms_by_block(pl_module)
        if trainer.is_global_zero:
            told = _describe(trainer, verdict, watch) | {"weight_norms": block_norms}
            with contextlib.suppress(OSError):  # told above
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "spike.json").write_text(json.dumps(told, indent=2) + "\n")
                _write_samples(folder / "samples.jsonl", trainer, parts, of_ranks)
                log.warning(f"Step {verdict.reading.step}: what it was made of is in {folder}")

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
        torch.save(
            {
                "batches": [_on_host(one.batch) for one in parts],
                "losses": losses,
                "random": [one.random for one in parts],
            },
            folder / f"rank_{trainer.global_rank:05d}.pt",
        )
        save_weights = getattr(pl_module, "save_weights", None)
        # on a GPU the step after has been made by now, and these are not the weights of that step any more
        are_those = verdict.refused and verdict.reading.step == trainer.global_step
        if callable(save_weights) and are_those:
            save_weights(folder / "weights")


def _describe(trainer: Trainer, verdict: Verdict, watch: SpikeMonitor) -> dict[str, Any]:
    reading = verdict.reading
    scale = getattr(trainer.strategy, "current_loss_scale", None)
    return {
        "step": reading.step,
        "loss": finite(reading.loss),
        "grad_norm": None if reading.norm is None else finite(reading.norm),
        "skipped": verdict.refused,
        "alarms": {
            name: {
                key: value if isinstance(value, str) else finite(value)
                for key, value in asdict(alarm).items()
            }
            for name, alarm in verdict.alarms.items()
        },
        "windows": {name: detector.window for name, detector in watch.detectors.items()},
        "learning_rates": [
            float(group["lr"])
            for optimizer in trainer.optimizers
            for group in optimizer.param_groups
        ],
        "loss_scale": scale,
        "world_size": trainer.world_size,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
    }


def _write_samples(
    path: Path, trainer: Trainer, parts: list[_MicroBatch], losses: list[list[Any]]
) -> None:
    """A line a sample: the largest losses first."""
    describe = getattr(getattr(trainer, "datamodule", None), "samples_of_step", None)
    position = parts[-1].position if parts else None
    if callable(describe) and position is not None:
        samples = describe(position)
    else:
        samples = [
            {"rank": rank, "micro_batch": number, "row": row}
            for rank, of_rank in enumerate(losses)
            for number, of_part in enumerate(of_rank)
            for row in range(len(of_part or []))
        ]
    for one in samples:
        of_part = losses[one["rank"]][one["micro_batch"]] if one["rank"] < len(losses) else None
        one["loss"] = None if of_part is None else finite(of_part[one["row"]])
    samples.sort(key=lambda one: -math.inf if one["loss"] is None else -one["loss"])
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in samples))


@torch.no_grad()
def _sample_losses(trainer: Trainer, pl_module: LightningModule, batch: Any) -> Tensor | None:
    """Of one micro-batch, [B] on the host, without dropout; None where the module does not tell."""
    ask = getattr(pl_module, "sample_losses", None)
    if not callable(ask):
        return None
    modes = [(module, module.training) for module in pl_module.modules()]
    pl_module.eval()
    try:
        with trainer.precision_plugin.forward_context():  # shards may be gathered in its type alone
            losses: Tensor = ask(batch)
        return losses.detach().float().cpu()
    finally:
        for module, training in modes:
            module.training = training


def _on_host(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.detach().cpu()
    if isinstance(batch, dict):
        return {key: _on_host(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [_on_host(value) for value in batch]
    return batch


def _gather(mine: list[Any]) -> list[list[Any]]:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [mine]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every
