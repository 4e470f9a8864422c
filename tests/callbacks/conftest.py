"""Someone else's project: a plain module that imports nothing from here, and a quiet Trainer to fit it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


class FakeClock:
    """A clock that only a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class ThirdPartyModule(LightningModule):
    """Least squares on eight numbers, batches of two: 8 training batches, 2 validation batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.layer(batch[0]).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=2)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=2)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def plain_module() -> type[ThirdPartyModule]:
    return ThirdPartyModule


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., Trainer]:
    """Return a function that makes a Trainer; by default it logs one row per step to tmp_path/run/metrics.csv."""

    def make(**arguments: Any) -> Trainer:
        defaults: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "log_every_n_steps": 1,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 0,
            "enable_progress_bar": any(isinstance(each, ProgressBar) for each in arguments.get("callbacks", [])),
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "logger": CSVLogger(tmp_path, name="", version="run"),
            "default_root_dir": tmp_path,
        }
        return Trainer(**{**defaults, **arguments})

    return make


@pytest.fixture
def read_column(tmp_path: Path) -> Callable[[str], list[float]]:
    """Return a function that reads the non-empty cells of one column of the run's metrics.csv."""
    import csv

    def read(name: str) -> list[float]:
        with (tmp_path / "run" / "metrics.csv").open() as file:
            return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]

    return read


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence Lightning's advice."""
    import logging
    import warnings

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", category=FutureWarning)
