"""Runs that each fail in a different way, and healthy runs for comparison: at most a minute each on one core.

`RECIPE_RUNS` are train.py overrides; `DIGITS_RUNS` use a Lightning module whose author does not use this project, with
Lightning's CSVLogger and metric names such as `train_loss` and `lr-Adam`.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import recipes  # noqa: F401  # isort: skip  # before Lightning, as in measure.py

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parent.parent))

from callbacks import MemoryMonitor, SpeedMonitor

# a GPT with 200,000 parameters, trained on the source code of the standard library
_SMALL = (
    "trainer.accelerator=cpu",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.hidden_size=64",
    "model.max_seq_len=64",
    "global_batch_size=8",
    "eval_samples=64",
    "eval_every=40",
    "save_every=null",
    "warmup_steps=40",
    "trainer.max_steps=400",
    "callbacks=[grad_norm,throughput,memory,loss_scale]",  # no LossSpikeRollback: it prevents some failures
)

# run name -> train.py overrides
RECIPE_RUNS: dict[str, tuple[str, ...]] = {
    "no_learning_rate": (*_SMALL, "optimizer.lr=1e-12"),
    "too_high_rate": (
        *_SMALL,
        "optimizer=sgd",
        "optimizer.lr=30",
        "optimizer.nesterov=false",
        "trainer.gradient_clip_val=null",
        "scheduler=constant",
        "warmup_steps=300",
    ),
    "tiny_clip": (*_SMALL, "trainer.gradient_clip_val=0.01"),
    "no_warmup": (*_SMALL, "optimizer.lr=0.2", "warmup_steps=1", "trainer.gradient_clip_val=null"),
    "early_decay": (*_SMALL, "scheduler=linear", "scheduler.num_steps=100", "warmup_steps=20"),
    "float16_overflow": (*_SMALL, "precision=16-mixed", "z_loss=1e7", "log_every=2"),
    "long_schedule": (*_SMALL, "scheduler.num_steps=2000"),
    "clean_gpt": _SMALL,
    "clean_llama": (
        *_SMALL,
        "model=llama_nano",
        "model.num_kv_heads=1",
        "model.ffn_hidden_size=128",
        "scheduler=constant",
        "optimizer.lr=1e-3",
    ),
    "clean_resnet": (
        "model=resnet18",
        "optimizer=sgd",
        "optimizer.lr=0.02",
        "global_batch_size=16",
        "trainer.accelerator=cpu",
        "trainer.max_steps=150",
        "warmup_steps=20",
        "eval_every=15",
        "save_every=null",
        "callbacks=[grad_norm,throughput,memory]",
    ),
    "clean_slow": (
        *_SMALL,
        "optimizer.lr=1e-4",
        "trainer.max_steps=1000",
        "scheduler=constant",
        "eval_every=100",
        "log_every=4",
    ),
}


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Scanned digits: images [N, 64] and classes [N].

    Args:
        images: Pixel values from 0 to 1.
        labels: Class of each image.
        sleep: Maps the fetch count to the extra seconds that a fetch takes.
    """

    def __init__(self, images: Tensor, labels: Tensor, sleep: Callable[[int], float] | None = None) -> None:
        self.images, self.labels, self.sleep = images, labels, sleep
        self.num_fetched = 0

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.num_fetched += 1
        if self.sleep is not None:
            time.sleep(self.sleep(self.num_fetched))
        return self.images[index], self.labels[index]


@dataclass(frozen=True, kw_only=True)
class DigitsRun:
    """A classifier of scanned digits with a planted problem.

    Attributes:
        learning_rate: Learning rate of Adam, or of SGD if there is momentum.
        num_train: Number of training images; the rest are for validation.
        noise: Standard deviation of the noise added to each training image.
        wrong_labels: Fraction of training images with a random class, fixed for the whole run.
        shuffles_labels: Whether the classes of each training batch are shuffled relative to its images.
        bad_steps: Steps at which only that batch's classes are shuffled.
        corrupted_steps: Steps whose gradient is 20 times too large.
        is_sorted: Whether every epoch goes through the training images class by class.
        sleep: Maps the fetch count to the extra seconds that a fetch takes.
        kept_mib: Memory that each step leaks.
        random_inputs: Dimension of random vectors to memorize instead of the images; disables validation.
    """

    seed: int = 0
    num_epochs: int = 8
    batch_size: int = 32
    learning_rate: float = 1e-3
    hidden: int = 64
    num_train: int = 1400
    noise: float = 0.0
    momentum: float | None = None
    wrong_labels: float = 0.0
    shuffles_labels: bool = False
    bad_steps: Sequence[int] = ()
    corrupted_steps: Sequence[int] = ()
    is_sorted: bool = False
    sleep: Callable[[int], float] | None = None
    kept_mib: float = 0.0
    random_inputs: int | None = None


class DigitsModule(lightning.LightningModule):
    """A LightningModule as a user would write it, with its own metric names."""

    def __init__(self, run: DigitsRun) -> None:
        super().__init__()
        self.run = run
        self.kept: list[Tensor] = []
        self.net = nn.Sequential(nn.Linear(run.random_inputs or 64, run.hidden), nn.ReLU(), nn.Linear(run.hidden, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch  # [B, 64], [B]
        images = images + self.run.noise * torch.randn_like(images)
        if self.run.shuffles_labels or self.global_step in self.run.bad_steps:
            labels = labels[torch.randperm(len(labels))]
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss)
        if self.run.kept_mib:
            self.kept.append(torch.ones(int(self.run.kept_mib * 2**18)))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step in self.run.corrupted_steps:
            for parameter in self.parameters():
                parameter.grad *= 20
        self.log("grad_norm", torch.nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.log("val_loss", F.cross_entropy(self.net(images), labels))

    def configure_optimizers(self) -> Any:
        if self.run.momentum is not None:
            return torch.optim.SGD(self.parameters(), self.run.learning_rate, self.run.momentum)
        return torch.optim.Adam(self.parameters(), self.run.learning_rate)


# 352 steps unless stated otherwise, 44 per epoch
DIGITS_RUNS: dict[str, DigitsRun] = {
    "shuffled_labels": DigitsRun(shuffles_labels=True),
    "bad_batches": DigitsRun(bad_steps=(97, 150, 211, 260, 330), learning_rate=3e-3),
    "corrupted_gradients": DigitsRun(corrupted_steps=(120, 200, 280), learning_rate=0.05, momentum=0.9),
    "sorted_batches": DigitsRun(is_sorted=True),
    "small_data": DigitsRun(num_train=128, hidden=256, num_epochs=80, learning_rate=3e-3, wrong_labels=0.2),
    "repeated_data": DigitsRun(
        random_inputs=1024, num_train=600, batch_size=8, learning_rate=0.02, momentum=0.0, num_epochs=6
    ),
    "easier_validation": DigitsRun(noise=0.5),
    "slowing_source": DigitsRun(sleep=lambda n: 2e-7 * n),
    "slow_source": DigitsRun(sleep=lambda n: 1e-3),
    "kept_tensors": DigitsRun(kept_mib=2.0),
    "clean_digits": DigitsRun(),
}


def train_digits(run: DigitsRun, folder: Path) -> None:
    """Train, with Lightning's CSVLogger: `metrics.csv` is in the folder afterwards."""
    lightning.seed_everything(run.seed, verbose=False)
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(run.seed))
    images, classes = torch.tensor(pixels / 16, dtype=torch.float32)[order], torch.tensor(labels)[order]
    if run.random_inputs is not None:
        images = torch.randn(len(images), run.random_inputs, generator=torch.Generator().manual_seed(run.seed))
    train, val = slice(run.num_train), slice(run.num_train, None)
    train_images, train_classes = images[train], classes[train]
    if run.is_sorted:
        by_class = train_classes.argsort()
        train_images, train_classes = train_images[by_class], train_classes[by_class]
    random = torch.Generator().manual_seed(run.seed)
    wrong = torch.rand(run.num_train, generator=random) < run.wrong_labels
    train_classes = torch.where(wrong, torch.randint(10, (run.num_train,), generator=random), train_classes)
    samples = Samples(train_images, train_classes, run.sleep)
    trainer = lightning.Trainer(
        max_epochs=run.num_epochs,
        accelerator="cpu",
        logger=CSVLogger(folder, name="", version=""),
        callbacks=[LearningRateMonitor(), SpeedMonitor(), MemoryMonitor()],
        log_every_n_steps=1,
        limit_val_batches=1.0 if run.random_inputs is None else 0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(samples, batch_size=run.batch_size, shuffle=not run.is_sorted, drop_last=True)
    trainer.fit(DigitsModule(run), loader, DataLoader(Samples(images[val], classes[val]), batch_size=200))


# the expected first finding for each run; None means no finding
EXPECTED: dict[str, str | None] = {
    "no_learning_rate": "nothing_learned",
    "shuffled_labels": "nothing_learned",
    "too_high_rate": "diverged",
    "corrupted_gradients": "unstable_spikes",
    "bad_batches": "bad_batches",
    "sorted_batches": "not_shuffled",
    "repeated_data": "memorizing",
    "small_data": "overfitting",
    "easier_validation": "easier_validation",
    "slowing_source": "slowing_down",
    "slow_source": "waiting_for_data",
    "kept_tensors": "memory_growing",
    "float16_overflow": "loss_scale_collapsing",
    "tiny_clip": "clipped_every_step",
    "no_warmup": "warmup_too_short",
    "early_decay": "decayed_too_early",
    "long_schedule": "ended_before_decay",
    "clean_gpt": None,
    "clean_llama": None,
    "clean_resnet": None,
    "clean_slow": None,
    "clean_digits": None,
}
