"""Clipping works where Lightning 2.6 rejects it."""

from pathlib import Path

import lightning
import pytest
import torch
from packaging.version import Version
from support import TINY, composed_config, read_metrics, resolved
from torch import nn

from recipes.build import build


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_fused_adamw_is_clipped_under_every_precision(precision: str, tmp_path: Path, text_folder: str) -> None:
    config = composed_config(
        *TINY,
        f"data.path={text_folder}",
        f"precision={precision}",
        "trainer.max_steps=2",
        "trainer.gradient_clip_val=0.01",
    )
    run = build(resolved(config, tmp_path))
    run.trainer.fit(run.task, datamodule=run.data)
    rows = read_metrics(tmp_path)
    assert run.trainer.optimizers[0].param_groups[0]["fused"] is True
    assert all(row["grad/norm"] > 0.1 for row in rows)
    assert all(row["grad/clipped_fraction"] == 1.0 for row in rows)


class Plain(lightning.LightningModule):
    """A module with fused AdamW that leaves clipping to Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True)


def test_lightning_still_rejects_fused_adamw_with_clipping_under_bf16_mixed() -> None:
    """If this fails, Lightning has fixed #21435 and `configure_gradient_clipping` can become simpler."""
    assert Version(lightning.__version__) < Version("2.7")
    trainer = lightning.Trainer(
        accelerator="cpu",
        precision="bf16-mixed",
        max_steps=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(RuntimeError, match="unscaling"):
        trainer.fit(Plain(), torch.utils.data.DataLoader(torch.ones(4, 2)))
