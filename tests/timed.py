"""A module whose clock advances only with its data, steps and validations."""

from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from callbacks.throughput.callback import SpeedMonitor

STEP, FETCH, VALIDATION = 0.75, 0.25, 64.0


def timed(base: type, clock: Any, *, first_step: float = STEP, counts: bool = True) -> Any:
    """Return a module whose first step takes `first_step` and that consumes 2 samples of 8 tokens per batch."""

    class Slow(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, i: int) -> Tensor:
            import torch

            clock.now += FETCH
            return torch.ones(4)

    class Timed(base):  # type: ignore[misc]
        num_samples = num_tokens = 0

        def recipes_consumed(self) -> tuple[int, int]:
            return self.num_samples, self.num_tokens

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            clock.now += STEP if self.trainer.global_step or batch_idx else first_step
            if counts:
                self.num_samples += 2
                self.num_tokens += 16
            return super().training_step([batch], batch_idx)

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            clock.now += VALIDATION
            super().validation_step(batch, batch_idx)

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(Slow(), batch_size=1)

    return Timed()


def monitor_at(clock: Any) -> SpeedMonitor:
    monitor = SpeedMonitor()
    monitor.clock = clock
    return monitor
