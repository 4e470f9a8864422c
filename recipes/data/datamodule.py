"""The training stream and the validation split as loaders; the position in the stream is one counter of samples."""

import itertools
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Annotated, Any

import lightning.pytorch as lightning
import numpy as np
import torch
from torch.utils.data import DataLoader, Subset

from recipes.data import DataSource, SampleDataset
from recipes.data.batches import Batch, RankShare, with_num_targets
from recipes.data.sampler import PositionSampler, RepeatedOrder, ShuffledOrder
from recipes.numerics.accumulation import Accumulation

LOGGER = logging.getLogger("lightning_recipes")
# processes a device: enough to hide a memory map or small images behind a 50 ms step
GPU_WORKERS = 4


class StreamDataModule(lightning.LightningDataModule):
    """An endless stream of training samples in an order that (seed, position) fixes, and a fixed validation split.

    Args:
        source: Where samples come from.
        accumulation: Global batch and micro-batches.
        seed: Of the order.
        eval_samples: Validation samples per evaluation, spread evenly over the split; None: all.
        num_workers: Loader processes a device; None: some where there is a GPU, else none.
        overfit_batches: The stream is its first so many global batches again and again, and validation is on them
            too: a model that knows them by heart in training and not in evaluation has a fault. None: all data.

    Attributes:
        position: Training samples consumed so far over all ranks. Saved in checkpoints as it is, so that it
            survives another number of ranks, workers or micro-batches.
    """

    def __init__(
        self,
        *,
        source: DataSource,
        accumulation: Accumulation,
        seed: int,
        eval_samples: int | None,
        num_workers: Annotated[int, ">= 0"] | None,
        overfit_batches: Annotated[int, ">= 1"] | None = None,
    ) -> None:
        super().__init__()
        self.source = source
        self.position = 0
        self._has_moved = False
        self._accumulation = accumulation
        self._seed = seed
        self._eval_samples = eval_samples
        self._num_workers = num_workers
        self._period: int | None = None  # samples after which the stream begins again
        if overfit_batches is not None:
            self._period = overfit_batches * accumulation.global_batch_size

    def prepare_data(self) -> None:
        self.source.prepare()

    def setup(self, stage: str) -> None:
        self.source.prepare()  # cached by now: every rank opens what one rank prepared

    def train_dataloader(self) -> "Stream":
        if self._period is not None:
            LOGGER.info(
                "overfit: the first %d samples again and again, and validation on the same ones",
                self._period,
            )
        return Stream(self, self.source.train())

    def val_dataloader(self) -> DataLoader[Batch]:
        dataset = self.source.val()
        if self._period is not None:
            dataset = self.source.train()
            first = self._order(len(dataset)).indices(np.arange(self._period))
            dataset = Subset(dataset, first.tolist())  # type: ignore[arg-type, assignment]
        return self._loader(self._share(_evenly(dataset, self._eval_samples)))

    def split_dataloader(self, split: str) -> DataLoader[Batch]:
        """The whole of one split in order, for `mode=evaluate`."""
        whole = self.source.train() if split == "train" else self.source.val()
        return self._loader(self._share(whole))

    def _share(self, dataset: Any) -> Any:
        """This rank's share of a split."""
        trainer = self._trainer()
        return RankShare(dataset, rank=trainer.global_rank, world_size=trainer.world_size)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position} | self._identity()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]
        now = self._identity()
        saved = {"period": None} | state_dict  # none in the files of earlier versions
        changed = [f"{key} {saved[key]} -> {now[key]}" for key in now if now[key] != saved[key]]
        if changed:
            LOGGER.warning(
                "The training data is not that of the checkpoint (%s): position %d now means other samples",
                ", ".join(changed),
                self.position,
            )

    def _identity(self) -> dict[str, Any]:
        """What makes a position mean the same sample again."""
        return {
            "seed": self._seed,
            "num_samples": len(self.source.train()),
            "fingerprint": self.source.fingerprint,
            "period": self._period,
        }

    def _order(self, num_samples: int) -> ShuffledOrder:
        if self._period is None:
            return ShuffledOrder(num_samples, self._seed)
        return RepeatedOrder(num_samples, self._seed, period=self._period)

    def micro_batches(self, dataset: SampleDataset) -> Iterator[Batch]:
        """This rank's micro-batches from `position` on; `position` moves on when a window's last one is handed out."""
        while True:
            self._has_moved = False
            for batch in self._stream_from_position(dataset):
                yield batch
                if self._has_moved:
                    break

    def _stream_from_position(self, dataset: SampleDataset) -> Iterator[Batch]:
        trainer, plan = self._trainer(), self._accumulation
        sampler = PositionSampler(
            self._order(len(dataset)),
            start_position=self.position,
            micro_batch_size=plan.micro_batch_size,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
        )
        constant = dataset.targets_per_sample
        stream = with_num_targets(
            self._loader(dataset, batch_sampler=sampler),
            num_micro_batches=plan.num_micro_batches,
            targets_per_window=None if constant is None else constant * plan.global_batch_size,
            sum_over_ranks=trainer.strategy.sum_over_ranks,  # type: ignore[attr-defined]
        )
        for number, batch in enumerate(stream, start=1):
            if number % plan.num_micro_batches == 0:
                self.position += plan.global_batch_size
            yield batch

    def samples_of_step(self, position: int) -> list[dict[str, Any]]:
        """What a step was made of: samples by their place in it, in the stream and in the data.

        Args:
            position: After the step.
        """
        plan, ranks = self._accumulation, self._trainer().world_size
        order = self._order(len(self.source.train()))
        first = position - plan.global_batch_size
        places = itertools.product(
            range(plan.num_micro_batches), range(ranks), range(plan.micro_batch_size)
        )
        describe: Any = getattr(self.source, "describe_sample", lambda _: {})
        told = []
        for offset, (micro_batch, rank, row) in enumerate(places):
            sample = order(first + offset)
            place = {"rank": rank, "micro_batch": micro_batch, "row": row}
            told.append({"position": first + offset, "sample": sample} | place | describe(sample))
        return told

    def skip_batches(self, num_steps: int) -> None:
        """Pass over so many optimizer steps' worth of samples, from the end of a step on."""
        self.move_to(self.position + num_steps * self._accumulation.global_batch_size)

    def move_to(self, position: int) -> None:
        """Go on with another sample of the stream, from the end of a step on. Loader processes start anew."""
        self.position = position
        self._has_moved = True

    def _loader(self, dataset: Any, **order: Any) -> DataLoader[Batch]:
        on_gpu = self._trainer().strategy.root_device.type == "cuda"
        workers = self._num_workers
        if workers is None:
            workers = min(GPU_WORKERS, os.cpu_count() or 1) if on_gpu else 0
        if "batch_sampler" not in order:
            order |= {"batch_size": self._accumulation.micro_batch_size}
        return DataLoader(
            dataset,
            **order,
            num_workers=workers,
            pin_memory=on_gpu,
            persistent_workers=workers > 0,
            prefetch_factor=4 if workers else None,
            worker_init_fn=outlive_signals,
            generator=torch.Generator().manual_seed(
                self._seed
            ),  # never the run's own random numbers
        )

    def _trainer(self) -> lightning.Trainer:
        assert self.trainer is not None, "the loaders need the Trainer's ranks and device"
        return self.trainer


class Stream:
    """What Lightning iterates: endless, so that no epoch ever ends and no partial window reaches the optimizer."""

    def __init__(self, data: StreamDataModule, dataset: SampleDataset) -> None:
        self._data = data
        self._dataset = dataset

    def __iter__(self) -> Iterator[Batch]:
        return self._data.micro_batches(self._dataset)

    def __len__(self) -> int:
        # a length, however large, keeps Lightning from reading one batch ahead
        return sys.maxsize


def _evenly(dataset: SampleDataset, num_samples: int | None) -> Any:
    """`num_samples` samples spread evenly over a data set; all where there are no more."""
    if num_samples is None or num_samples >= len(dataset):
        return dataset
    return Subset(dataset, [i * len(dataset) // num_samples for i in range(num_samples)])  # type: ignore[arg-type]


def outlive_signals(worker: int) -> None:
    """For `DataLoader(worker_init_fn=…)`: heed SIGTERM from the rank alone; SIGUSR1 means nothing here.

    torchrun, `timeout` and systemd signal the whole process group. torch takes a loader process that ends for a crash
    of the run, which then could not save.

    Args:
        worker: Its number.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_for_parent, name=f"signals_{worker}", daemon=True).start()


def _end_for_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
