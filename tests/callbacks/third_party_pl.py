"""Train with `pytorch_lightning`, imported after the callbacks, and print what they did: python third_party_pl.py."""

import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

# before the package, as an import that is sorted by name
import callbacks as ours
from callbacks import EarlyStop, LossSpikeRollback, ProgressLine, StepProfiler

# isort: split
import pytorch_lightning as pl
import torch
from lightning.pytorch import Callback
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar
from pytorch_lightning.profilers import PyTorchProfiler

from callbacks.lightning_packages import find_classes
from callbacks.loss_spike.train_state import live_scalars

torch.set_num_threads(1)
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = (self.layer(batch) - 1).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.003)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.randn(60 * 8, 4), batch_size=8)


class Damage(pl.Callback):
    """Damages a weight once."""

    is_done = False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 35 and not self.is_done:
            self.is_done = True
            with torch.no_grad():
                pl_module.layer.weight += 50


def make_trainer(*monitors: Any, **arguments: Any) -> pl.Trainer:
    return pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_model_summary=False,
        default_root_dir=tempfile.mkdtemp(),
        callbacks=[*monitors],
        **arguments,
    )


def main() -> None:
    lines: list[str] = []
    log = logging.getLogger("lightning_recipes")
    log.addHandler(handler := logging.Handler())
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]

    spikes = LossSpikeRollback(
        action="rollback", min_rise=0.0, window=16, warmup_steps=8, snapshot_every=10, quarantine_steps=10
    )
    progress, stop = ProgressLine(), EarlyStop(monitor="loss")
    saver = ModelCheckpoint(every_n_train_steps=15, save_top_k=-1)
    trainer = make_trainer(Damage(), spikes, progress, stop, EarlyStopping("loss"), saver)
    trainer.fit(Module())
    found = {
        "rollback": spikes.summary(),
        "bars": [type(each).__name__ for each in trainer.callbacks if isinstance(each, ProgressBar)],
        "stateful": len(live_scalars(trainer)["callbacks"]),
        "no longer listed": [line for line in lines if "No longer in the list of ModelCheckpoint" in line] != [],
    }
    public = [each for name in ours.__all__ if isinstance(each := getattr(ours, name), type)]
    ours_alone = [each.__name__ for each in public if issubclass(each, Callback) and not issubclass(each, pl.Callback)]
    found["of one package"] = ours_alone

    profiled = make_trainer(
        StepProfiler(steps=2, after=2),
        profiler=PyTorchProfiler(dirpath=tempfile.mkdtemp(), filename="trace"),
        limit_train_batches=6,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    profiled.fit(Module())
    found["profiled"] = [line for line in lines if "another torch profiler" in line] != []
    names = ("strategies.FSDPStrategy", "strategies.DeepSpeedStrategy", "strategies.DDPStrategy", "callbacks.Absent")
    found["classes"] = len(find_classes(*names))
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
