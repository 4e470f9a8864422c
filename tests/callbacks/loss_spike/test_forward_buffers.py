"""A skipped step leaves buffers as they were; a large one that no forward pass changes costs nothing."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from callbacks import LossSpikeRollback

LARGE = 2**16 + 1
STEPS, BAD = 8, 5


class Buffered(LightningModule):
    """Changes its buffers in all the ways of public modules; batch `BAD` is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        for name in ("queue", "codebook", "joined", "average", "early_average", "table"):
            self.register_buffer(name, torch.zeros(LARGE))
        self.register_buffer("center", torch.zeros(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        batch = batch * torch.nan if batch_idx == BAD else batch
        with torch.no_grad():
            self.queue[batch_idx] = batch.mean()
            self.codebook.data.copy_(self.codebook + batch.mean())
            self.joined = torch.cat([batch.mean()[None], self.joined[:-1]])
            self.center = 0.9 * self.center + 0.1 * batch.mean(dim=0)
        return self.net(batch).square().mean()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.early_average += 1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.average += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(1 + torch.rand(STEPS * 2 * 4, 4), batch_size=4)  # type: ignore[arg-type]


class Copied(Callback):
    """Records the names of the large buffers that were copied before each step."""

    def __init__(self, spikes: LossSpikeRollback) -> None:
        self.spikes = spikes
        self.names: list[set[str]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        assert self.spikes._reader is not None
        copied = self.spikes._reader._buffers.copied
        self.names.append({place.key for place, copy in copied if copy.numel() >= LARGE})


def test_large_buffers_are_copied_only_if_the_forward_pass_changes_them(make_trainer: Any) -> None:
    torch.manual_seed(0)
    module, spikes = Buffered(), LossSpikeRollback()
    copied = Copied(spikes)
    make_trainer(callbacks=[spikes, copied], limit_train_batches=STEPS).fit(module)
    assert spikes.summary()["skipped_steps"] == 1
    assert copied.names == [set()] + (STEPS - 1) * [{"queue", "codebook", "joined"}]
    assert all(bool(buffer.isfinite().all()) for buffer in module.buffers())
    assert module.queue[:STEPS].bool().tolist() == [number != BAD for number in range(STEPS)]
    assert int(module.joined.count_nonzero()) == STEPS - 1
    assert module.net[1].num_batches_tracked == STEPS - 1
    # of weights, which the step left as they were: their updates are not undone
    assert float(module.average[0]) == float(module.early_average[0]) == STEPS


def test_a_buffer_that_the_second_micro_batch_changes_is_restored_too(make_trainer: Any) -> None:
    class Later(Buffered):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if batch_idx % 2:
                self.table[batch_idx] = torch.nan if batch_idx == BAD else 1.0
            return self.net(batch).square().mean() * (torch.nan if batch_idx == BAD else 1.0)

    torch.manual_seed(0)
    module, spikes = Later(), LossSpikeRollback()
    make_trainer(callbacks=[spikes], limit_train_batches=STEPS, accumulate_grad_batches=2).fit(module)
    assert spikes.summary()["skipped_steps"] == 1
    assert module.table[: STEPS + 1].tolist() == [0, 1, 0, 1, 0, 0, 0, 1, 0]
