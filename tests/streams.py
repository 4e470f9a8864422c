"""The training stream of a data source as one rank sees it, without a Trainer and its processes."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from recipes.data.datamodule import StreamDataModule
from recipes.loss.cross_entropy import CrossEntropy
from recipes.numerics.accumulation import Accumulation

SEED = 3


def open_stream(
    source: Any,
    *,
    micro_batch_size: int = 8,
    accumulate: int = 1,
    num_workers: int = 0,
    world_size: int = 1,
    rank: int = 0,
    position: int = 0,
    eval_samples: int | None = None,
    overfit_batches: int | None = None,
) -> tuple[StreamDataModule, Iterator[Any]]:
    """Return the data module of one rank and its micro-batches."""
    data = StreamDataModule(
        source=source,
        loss=CrossEntropy(),
        accumulation=Accumulation(
            global_batch_size=micro_batch_size * accumulate * world_size,
            micro_batch_size=micro_batch_size,
            num_micro_batches=accumulate,
        ),
        seed=SEED,
        eval_samples=eval_samples,
        num_workers=num_workers,
        overfit_batches=overfit_batches,
    )
    strategy = SimpleNamespace(
        root_device=torch.device("cpu"), data_rank=rank, data_size=world_size, sum_over_data_ranks=lambda value: value
    )
    data.trainer = SimpleNamespace(strategy=strategy)  # type: ignore[assignment]
    data.load_state_dict(data.state_dict() | {"position": position})
    return data, iter(data.train_dataloader())


def take(batches: Iterator[Any], number: int) -> Tensor:
    """Return the inputs of the next micro-batches, [N, …]."""
    return torch.cat([next(batches)["inputs"] for _ in range(number)])
