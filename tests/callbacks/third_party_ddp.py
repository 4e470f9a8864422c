"""Run one of two ranks of a plain Lightning project under DDP: python third_party_ddp.py - <results.json>."""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"TORCHELASTIC_RUN_ID": "third_party", "GROUP_RANK": "0"}
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from callbacks import LossSpikeRollback


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
        self.seen: list[tuple[int, float]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self.layer(batch[0]) - 1).square().mean()
        self.seen.append((self.trainer.global_step, float(loss.detach())))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.003)

    def train_dataloader(self) -> DataLoader[Any]:
        noise = torch.randn(2 * 60 * 8, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(noise), batch_size=8)


class Damage(Callback):
    """Damages the gradient of one rank, and later a weight of every rank."""

    def __init__(self) -> None:
        self.is_done = False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 20 and trainer.global_rank == 1:
            batch[0].fill_(torch.inf)
        if batch_idx == 35 and not self.is_done:
            self.is_done = True
            with torch.no_grad():
                pl_module.layer.weight += 50


def main() -> None:
    torch.set_num_threads(1)
    module = Module()
    spikes = LossSpikeRollback(
        action="rollback", min_rise=0.0, window=16, warmup_steps=8, snapshot_every=10, quarantine_steps=10
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=1,
        callbacks=[Damage(), spikes],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=Path(sys.argv[2]).parent,
    )
    trainer.fit(module)
    weights = [parameter.detach().flatten().tolist() for parameter in module.parameters()]
    gathered: list[Any] = [None, None]
    torch.distributed.all_gather_object(gathered, (weights, spikes.summary(), trainer.global_step))
    if trainer.is_global_zero:
        Path(sys.argv[2]).write_text(json.dumps(gathered))
    trainer.strategy.barrier()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # pytorch #190489: gloo may abort at exit
