"""The hand-written model as a LightningModule, under a Trainer with its defaults: bar, CSV logger, checkpoint."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import recipes  # noqa: F401  # isort: skip  # before Lightning, as in measure.py

import lightning.pytorch as lightning
import torch
from lightning.pytorch.callbacks import Callback
from spec import LOG_EVERY, Clock, Spec, read_spec
from torch import Tensor
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent.parent))

from plain_gpt2 import Gpt, Windows


class Module(lightning.LightningModule):
    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        vocab = spec.vocab_size if spec.vocab_size < 1000 else -(-spec.vocab_size // 64) * 64
        self.model = Gpt(vocab, spec.seq_len, spec.num_layers, spec.num_heads, spec.hidden_size)
        if spec.compile:
            self.model.compile()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(batch[:, :-1], batch[:, 1:])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        # not fused: Lightning clips no gradients of a fused optimizer under bf16-mixed (#21435)
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.spec.num_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class _Timer(Callback):
    def __init__(self) -> None:
        self.clock = Clock()

    def on_train_batch_start(self, *args: Any) -> None:
        self.clock.tick()


def main() -> None:
    spec, timer = read_spec(), _Timer()
    windows = Windows(spec.tokens, length=spec.seq_len, count=spec.num_steps * spec.batch)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_steps=spec.num_steps,
            precision="bf16-mixed" if spec.bf16 else "32-true",
            gradient_clip_val=1.0,
            log_every_n_steps=LOG_EVERY,
            callbacks=[timer],
            default_root_dir=folder,
        )
        trainer.fit(Module(spec), DataLoader(windows, batch_size=spec.batch, shuffle=True))
    timer.clock.report(spec)


if __name__ == "__main__":
    main()
