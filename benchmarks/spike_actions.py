"""Each setting of LossSpikeRollback in healthy runs of many kinds, and in runs with a fault: what it costs and repairs.

Every run is trained alone and under each setting, from one seed. A healthy run should stay as it is to the bit. A fault
that lasts is repaired if the loss at the end is nearer to that of the run without the fault than to that of the run
that nobody protects.
"""

import argparse as some_text
import logging
import math
import multiprocessing
import statistics
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from healthy_runs import GROWING, KINDS
from healthy_runs.base import HealthyRun, mlp, per_step
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import MixedPrecision
from measure import report
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from callbacks import LossSpikeRollback, TrainingDivergedError

SETTINGS: dict[str, dict[str, Any]] = {
    "warn": {},
    "skip": {"action": "skip"},
    "repair": {"action": "repair"},
    "rollback": {"action": "rollback"},
    "language models": {"action": "rollback", "min_rise": 0, "drift_threshold": 1.75, "max_non_finite": 3},
}
STEPS, AT, LAST = 500, 300, 100
# of the kinds of `spikes.py healthy`, those that differ most
CHOSEN = (
    "classification, batches of 8",
    "warm restarts",
    "one cycle",
    "augmentation switched on",
    "a class added ten times",
    "a rare class of weight 100",
    "VAE, KL warm-up",
    "GAN, reversed gradients",
    "policy gradient, changing rewards",
    "Q-learning, renewed target",
    "learned variance, negative loss",
    "three tasks by turns",
    "diffusion",
    "LSTM, growing sequences",
    *GROWING,
)


class Catapult(HealthyRun):
    """Full-batch descent whose learning rate rises 4.5-fold at step 200: the loss rises far, then falls further."""

    learning_rate = 0.2

    def setup_run(self) -> None:
        super().setup_run()
        self.images, self.goals = self.images[:256], F.one_hot(self.labels[:256], 10).float()  # [N, 64], [N, 10]
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def loss(self) -> Tensor:
        return 5 * F.mse_loss(self.net(self.images), self.goals)

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), self.learning_rate)
        return per_step(optimizer, LambdaLR(optimizer, lambda step: 1.0 if step < 200 else 4.5))


class HeavyTails(HealthyRun):
    """Least squares on targets with Pareto noise: a single sample may have most of the loss."""

    def setup_run(self) -> None:
        self.net = mlp(1, 32, 1)

    def loss(self) -> Tensor:
        x = torch.rand(self.batch_size, 1, generator=self.random)  # [B, 1]
        noise = torch.rand(x.shape, generator=self.random).clamp(min=1e-6) ** (-1 / 2.5) - 1
        return F.mse_loss(self.net(x), torch.sin(9 * x) + noise)


class MaskCurriculum(HealthyRun):
    """Images are rebuilt from fewer pixels in each of four stages: the loss rises at once, and stays higher."""

    def loss(self) -> Tensor:
        images, _ = self.draw()
        kept = torch.rand(images.shape, generator=self.random) > 0.1 + 0.2 * int(self.progress * 4)
        return F.mse_loss(self.decoder(self.net(images * kept)), images)

    def setup_run(self) -> None:
        super().setup_run()
        self.decoder = nn.Linear(10, 64)


class HardMining(HealthyRun):
    """From half time on, each batch is the hardest tenth of a larger one."""

    def loss(self) -> Tensor:
        if self.progress < 0.5:
            return super().loss()
        batches = [self.draw() for _ in range(10)]
        images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        return F.cross_entropy(self.net(images), labels, reduction="none").topk(self.batch_size).values.mean()


class Routed(HealthyRun):
    """A mixture of experts with hard routing: samples change their expert, and lose what it had learned."""

    def setup_run(self) -> None:
        super().setup_run()
        self.router = nn.Linear(64, 4)
        self.experts = nn.ModuleList(mlp(64, 32, 10) for _ in range(4))

    def loss(self) -> Tensor:
        images, labels = self.draw()
        weights = self.router(images).softmax(dim=1)  # [B, 4]
        best, index = weights.max(dim=1)
        of_all = torch.stack([expert(images) for expert in self.experts], dim=1)  # [B, 4, 10]
        return F.cross_entropy(best[:, None] * of_all[torch.arange(len(index)), index], labels)


class Digits(HealthyRun):
    """Classification by SGD without a norm, which large inputs damage; its fault is in images or labels."""

    batch_size = 128
    fault: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def setup_run(self) -> None:
        super().setup_run()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def draw(self) -> tuple[Tensor, Tensor]:
        batch = super().draw()
        return batch if self.fault is None else self.fault(*batch)

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), 0.1, momentum=0.9)


class NormedDigits(Digits):
    """Classification with batch norm."""

    def setup_run(self) -> None:
        HealthyRun.setup_run(self)


class NextByte(HealthyRun):
    """A language model of 16 bytes on the source of a module of Python; its fault is in the targets."""

    batch_size = 64
    learning_rate = 3e-3
    fault: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def setup_run(self) -> None:
        text = Path(str(some_text.__file__)).read_bytes()
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()  # [characters]
        self.net = nn.Sequential(
            nn.Embedding(256, 16), nn.Flatten(), nn.Linear(256, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 256)
        )

    def loss(self) -> Tensor:
        start = torch.randint(len(self.text) - 17, (self.batch_size, 1), generator=self.random)
        rows = self.text[start + torch.arange(17)]  # [B, 17]
        context, target = rows[:, :-1], rows[:, -1]
        if self.fault is not None:
            context, target = self.fault(context, target)
        return F.cross_entropy(self.net(context), target)


class Regression(HealthyRun):
    """Least squares on a sine; its fault is in the targets."""

    fault: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def setup_run(self) -> None:
        self.net = mlp(1, 32, 1)

    def loss(self) -> Tensor:
        x = torch.rand(self.batch_size, 1, generator=self.random)  # [B, 1]
        y = torch.sin(9 * x) + 0.1 * self.normal(self.batch_size, 1)
        if self.fault is not None:
            x, y = self.fault(x, y)
        return F.mse_loss(self.net(x), y)


OTHERS: dict[str, type[HealthyRun]] = {
    "full-batch descent, a catapult": Catapult,
    "Pareto noise, squared error": HeavyTails,
    "masks growing in four stages": MaskCurriculum,
    "hard examples from half time on": HardMining,
    "experts with hard routing": Routed,
    "language model": NextByte,
}


def _inputs(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * 1000, y


def _targets(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.randint(int(y.max()) + 1, y.shape, generator=torch.Generator().manual_seed(0))


def _permuted(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, (y + 1) % 10


def _huge_target(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.cat([torch.full_like(y[:1], 1e6), y[1:]])


def _nan(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * torch.nan, y


def _overflow(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * 1e6, y  # above the largest float16


class Fault(Callback):
    """Injects a fault into the batches from `AT` on, whatever steps they are: a repeated step has another batch."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        since, group = batch_idx - AT, trainer.optimizers[0].param_groups[0]
        if self.kind in IN_BATCHES:
            is_damaged, damage = IN_BATCHES[self.kind]
            pl_module.fault = damage if since >= 0 and is_damaged(since) else None
        elif self.kind == "rate x 100 for good" and since == 0:
            group["lr"] *= 100
        elif self.kind == "rate x 100, 20 steps" and since in (0, 20):
            group["lr"] = pl_module.learning_rate * (100 if since == 0 else 1)
        elif self.kind == "rate + 2 % a step" and since >= 0:
            group["lr"] *= 1.02
        elif self.kind == "one weight 1e4" and since == 0:
            with torch.no_grad():
                pl_module.net[2].weight.view(-1)[0] = 1e4


# fault -> which batches since `AT` are damaged, and how
IN_BATCHES: dict[str, tuple[Callable[[int], bool], Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]] = {
    "inputs x 1000, one batch, batch norm": (lambda since: since == 0, _inputs),
    "inputs x 1000, one batch": (lambda since: since == 0, _inputs),
    "random targets, 10 batches": (lambda since: since < 10, _targets),
    "classes permuted for good": (lambda since: True, _permuted),
    "one target of 1e6": (lambda since: since == 0, _huge_target),
    "NaN in every 10th batch": (lambda since: since % 10 == 0, _nan),
    "float16, 30 overflowing batches": (lambda since: since < 30, _overflow),
}
FAULTS: dict[str, type[HealthyRun]] = {
    "inputs x 1000, one batch, batch norm": NormedDigits,
    "inputs x 1000, one batch": Digits,
    "random targets, 10 batches": NextByte,
    "rate x 100 for good": NextByte,
    "rate x 100, 20 steps": NextByte,
    "rate + 2 % a step": NextByte,
    "one weight 1e4": NextByte,
    "one target of 1e6": Regression,
    "NaN in every 10th batch": Regression,
    "float16, 30 overflowing batches": Digits,
    "classes permuted for good": NormedDigits,
}


class Events(DummyLogger):
    """Counts the events by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def log_event(self, event: str, step: int, **fields: Any) -> None:
        self.counts[event] = self.counts.get(event, 0) + 1


class Losses(Callback):
    """Records the loss of every batch."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values.append(float(outputs["loss"]))


def train(make: Callable[[int, int], HealthyRun], setting: dict[str, Any] | None, fault: str = "") -> Any:
    """Train one run; return the losses of its batches, the numbers of its events, and whether it was stopped."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    logging.getLogger("lightning_recipes").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    losses, events = Losses(), Events()
    spikes = [] if setting is None else [LossSpikeRollback(**setting, max_dumps=0)]
    more: dict[str, Any] = {}
    if fault.startswith("float16"):
        more = {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]}
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=events,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Fault(fault), *spikes, losses],
        **more,
    )
    stopped = False
    try:
        trainer.fit(make(STEPS, 99), DataLoader(range(STEPS)))  # type: ignore[arg-type]
    except TrainingDivergedError:
        stopped = True
    return {"losses": losses.values, "events": events.counts, "stopped": stopped}


def last_loss(run: Any) -> float:
    """Return the mean loss of the last batches, without those that are NaN themselves; inf if most are."""
    finite = [loss for loss in run["losses"][-LAST:] if math.isfinite(loss)]
    return statistics.fmean(finite) if len(finite) > LAST // 2 else math.inf


def describe(run: Any) -> str:
    """Return what was done to a run: skips, rollbacks and the end."""
    names = {"skip": "skipped", "rollback": "rolled back", "relearn": "relearned"}
    parts = [f"{name} {run['events'][event]}" for event, name in names.items() if run["events"].get(event)]
    return ", ".join([*parts, *(["stopped"] if run["stopped"] else [])])


def measure_healthy(kind: str, settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train a healthy run alone and under each setting."""
    make = KINDS.get(kind) or OTHERS[kind]
    alone = train(make, None)
    row: dict[str, Any] = {"run": kind, "last loss": f"{last_loss(alone):.3g}"}
    for name, setting in settings.items():
        run = train(make, setting)
        is_equal = run["losses"] == alone["losses"]
        alarms = run["events"].get("spike", 0)
        row[name] = f"{alarms} alarms" if is_equal and alarms else "equal" if is_equal else describe(run)
        if not is_equal:
            row[name] += f": {last_loss(run):.3g}"
    print(row, file=sys.stderr, flush=True)
    return row


def measure_fault(kind: str, settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train a run without its fault, with it, and under each setting."""
    make = FAULTS[kind]
    clean = last_loss(train(make, None, "float16" if kind.startswith("float16") else ""))
    alone = last_loss(train(make, None, kind))
    row: dict[str, Any] = {"fault": kind, "without it": f"{clean:.3g}", "unprotected": f"{alone:.3g}"}
    for name, setting in settings.items():
        run = train(make, setting, kind)
        done, loss = describe(run), last_loss(run)
        row[name] = f"{loss:.3g}{f' ({done})' if done else ''}"
        row[f"{name} repaired"] = not run["stopped"] and loss - clean < 0.5 * (alone - clean)
    row["lasts"] = alone > 1.05 * clean
    print(row, file=sys.stderr, flush=True)
    return row


def summarize(name: str, healthy: list[dict[str, Any]], faults: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of one setting: healthy runs that it changed, lasting faults that it repaired."""
    cells = [str(row[name]) for row in healthy]
    changed = [cell for cell in cells if ":" in cell]
    lasting = [row for row in faults if row["lasts"]]
    return {
        "setting": name,
        "healthy runs": len(cells),
        "of them with alarms": sum(cell != "equal" for cell in cells),
        "changed": len(changed),
        "rolled back": sum("rolled back" in cell for cell in changed),
        "stopped": sum("stopped" in cell for cell in changed),
        "lasting faults": len(lasting),
        "repaired": sum(row[f"{name} repaired"] for row in lasting),
        "runs with a fault that it stopped": sum("stopped" in str(row[name]) for row in faults),
    }


def main() -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        faults = pool.map(partial(measure_fault, settings=SETTINGS), FAULTS, chunksize=1)
        kinds = [*OTHERS, *CHOSEN]
        healthy = pool.map(partial(measure_healthy, settings=SETTINGS), kinds, chunksize=1)
    report("spike_actions", [summarize(name, healthy, faults) for name in SETTINGS])
    command = "python benchmarks/spike_actions.py"
    shown = ["fault", "without it", "unprotected", *SETTINGS]
    report("spike_actions_faults", [{key: row[key] for key in shown} for row in faults], command=command)
    shown = ["run", "last loss", *SETTINGS]
    report("spike_actions_healthy", [{key: row[key] for key in shown} for row in healthy], command=command)


if __name__ == "__main__":
    main()
