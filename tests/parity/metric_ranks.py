"""Compute validation metrics of fixed logits, as one rank: python metric_ranks.py <cases.json> <results.json>.

A case is a number of samples and a micro-batch size; this rank gets its shard of the samples, including padding.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path[:0] = [str(folder) for folder in Path(__file__).parents[:3]]

from run_cases import run_all  # noqa: E402
from support import composed_config, resolved  # noqa: E402

from recipes.build import _build_metrics  # noqa: E402
from recipes.data.batches import RankShare  # noqa: E402
from recipes.loss.cross_entropy import CrossEntropy  # noqa: E402
from recipes.metrics import ValidationMetrics  # noqa: E402


class Predicted:
    """Logits for ten classes, largest for the correct one, used as the inputs of samples."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.targets = torch.randint(10, (num_samples,), generator=generator)  # [N]
        self.logits = torch.randn(num_samples, 10, generator=generator)  # [N, V]
        self.logits[torch.arange(num_samples), self.targets] += 1.0

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.logits[index], "targets": self.targets[index]}


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the metrics over all ranks' samples; also works without ranks, for the reference."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    share = RankShare(Predicted(case["num_samples"]), rank=rank, world_size=world_size)
    config = composed_config("model=resnet18", "strategy=ddp", f"trainer.devices={world_size}")
    loss = CrossEntropy()
    validation = ValidationMetrics(_build_metrics(resolved(config, folder), loss), loss=loss)
    validation.reset()
    batches: Any = torch.utils.data.DataLoader(share, batch_size=case["micro_batch_size"])  # type: ignore[arg-type]
    for batch in batches:
        validation.update(loss(batch["inputs"], batch), outputs=batch["inputs"], batch=batch)
    values: dict[str, Any] = validation.compute()
    return values


if __name__ == "__main__":
    run_all(run_case)
    if dist.is_initialized():
        dist.destroy_process_group()
