"""Lightning data module: loaders for the training stream and the validation splits."""

import functools
import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

import lightning.pytorch as lightning
import numpy as np
import torch
from torch.utils.data import DataLoader, Subset
from typing_extensions import override

from recipes.data import DataSource, SampleDataset, get_val_fingerprint, in_section, prepare_with
from recipes.data.batches import Batch, RankShare, TrainingStream
from recipes.data.draws import DrawnSamples, has_draws, rng_at
from recipes.data.loader_process import SignalProofLoader
from recipes.data.order import Order, RepeatedOrder, ShuffledOrder
from recipes.engine import get_engine
from recipes.errors import ConfigError
from recipes.files import count
from recipes.loss import Loss
from recipes.numerics.accumulation import Accumulation
from recipes.numerics.loss import IGNORE_INDEX
from recipes.runtime.world import num_cores

LOGGER = logging.getLogger("lightning_recipes")
# loader processes per device: enough to hide reading a memory map or small images behind a 50 ms step
GPU_WORKERS = 4
_NUM_TRIED = 1000  # samples of a split that are read, at most, until two have different targets


class StreamDataModule(lightning.LightningDataModule):
    """An endless stream of training samples, ordered only by (seed, position), and fixed validation splits.

    Args:
        source: Data source.
        eval_sources: Sources of additional validation sets by name; their validation splits are used.
        loss: Loss whose counts over the global batch every micro-batch holds.
        accumulation: Global batch and micro-batches.
        seed: Seed of the order of training samples.
        eval_samples: Validation samples per evaluation, spread evenly over the split; None: all.
        num_workers: Loader processes per device; None: up to 4 for a GPU, none for a CPU.
        overfit_batches: Repeat the first N global batches of the stream, as they are drawn there, and validate on the
            same samples: if the training loss reaches zero but the validation loss does not, there is a bug. None: use
            all data.

    Attributes:
        looks_ahead: Whether the task reads all micro-batches of a step before the first; set before training.
    """

    def __init__(
        self,
        *,
        source: DataSource,
        eval_sources: Mapping[str, DataSource] | None = None,
        loss: Loss,
        accumulation: Accumulation,
        seed: int,
        eval_samples: int | None,
        num_workers: Annotated[int, ">= 0, <= 256"] | None,
        overfit_batches: Annotated[int, ">= 1"] | None = None,
    ) -> None:
        super().__init__()
        self.source = source
        self.eval_sources = dict(eval_sources or {})
        self._stream: TrainingStream | None = None
        self._start_position = 0
        self._loss = loss
        self._accumulation = accumulation
        self._seed = seed
        self._eval_samples = eval_samples
        self._num_workers = num_workers
        self.looks_ahead = False
        self._recorded_names: list[str] | None = None
        self._has_warned = False
        self._period: int | None = None  # samples after which the stream repeats
        if overfit_batches is not None:
            self._period = overfit_batches * accumulation.global_batch_size

    def hold_out(self, names: Iterable[str]) -> None:
        """Use all of some additional validation sets, of which no part is trained on; called before they are prepared.

        Without a split of their own, such as images, they are used as they are.
        """
        for name in names:
            getattr(self.eval_sources[name], "hold_out_all", lambda: None)()

    @property
    def window(self) -> list[Batch]:
        """Micro-batches of this rank in the current optimizer step, on the host, of a task that looks ahead."""
        return [] if self._stream is None else self._stream.window

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes, those of the run where a checkpoint of it is loaded; None: they are not known."""
        names = getattr(self.source, "class_names", None) if self._recorded_names is None else self._recorded_names
        return None if names is None else [*names]

    @property
    def has_new_samples(self) -> bool:
        """Whether the data has a split of new samples, of `mode=predict`."""
        return bool(getattr(self.source, "has_new_samples", False))

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self._accumulation.global_batch_size

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of each rank per optimizer step."""
        return self._accumulation.num_micro_batches

    @property
    def micro_batch_size(self) -> int:
        """Samples per forward pass of a rank."""
        return self._accumulation.micro_batch_size

    @property
    def position(self) -> int:
        """Training samples consumed so far over all ranks.

        It is independent of the number of ranks, workers and micro-batches, so a resumed run may change them.
        """
        return self._start_position if self._stream is None else self._stream.position

    @override
    def prepare_data(self) -> None:
        prepare_with(self.source, None)
        for name, source in self.eval_sources.items():
            with in_section(f"eval_data.{name}"):
                prepare_with(source, self.source.tokenizer)
        self._warn_of_shared_texts()

    def prepare_split(self, split: str, *, alone: bool = False) -> None:
        """Prepare what `split_dataloaders` reads, and no other split where splits are apart from each other.

        Args:
            split: train, val, test or predict.
            alone: Whether to leave out the additional validation sets, which belong to "val".
        """
        prepare_with(self.source, None, split=split)
        self._check_classes(self._recorded_names)
        if split == "val" and not alone:
            for name, source in self.eval_sources.items():
                with in_section(f"eval_data.{name}"):
                    prepare_with(source, self.source.tokenizer, split="val")
            self._warn_of_shared_texts()

    def find_doubts(self) -> Iterator[ConfigError]:
        """Yield the splits in which every target, or caption, is the same: a model that ignores its inputs is right.

        Of usual data, two or three samples are read; of a split with a rare class, up to 1,000 that are spread evenly.
        """
        kind = getattr(self.source, "sample_kind", "tokens")
        if kind == "tokens":
            return
        learned = "caption" if kind == "images_and_text" else "targets"
        for split in ("train", "val"):
            dataset: Any = getattr(self.source, split)()
            num_tried = min(_NUM_TRIED, len(dataset))
            places = [0, *range(num_tried - 1, 0, -1)]  # first and last: data may be sorted by class
            targets = (dataset[place * len(dataset) // num_tried].get(learned) for place in places)
            known = (target for target in targets if isinstance(target, torch.Tensor) and _has_any_loss(target))
            first = next(known, None)
            if first is None or num_tried == 1 or not all(torch.equal(first, other) for other in known):
                continue
            tried = f"all {num_tried:,} samples" if num_tried == len(dataset) else f"{num_tried:,} samples tried, all"
            if learned == "caption":
                reason = f"{tried} of {split} have the same caption: nothing says which image one belongs to"
                yield ConfigError(f"data.{split}", reason, "data.caption=<the right column>, or other data")
                continue
            reason = f"{tried} of {split} have the target {first.tolist()}: a model that ignores its inputs is right"
            yield ConfigError(f"data.{split}", reason, "data with other targets, too, or the right column as targets")

    @override
    def setup(self, stage: str) -> None:
        self.prepare_data()  # cached by now: every rank opens the files that one rank prepared
        max_steps = self._trainer().max_steps
        if stage == "fit" and max_steps > 0 and hasattr(self.source, "check_run"):
            self.source.check_run(max_steps * self._accumulation.global_batch_size)

    @override
    def train_dataloader(self) -> TrainingStream:
        if self._period is not None:
            LOGGER.info(
                "overfit: training repeats its first %d samples and validation uses the same ones",
                self._period,
            )
        engine, dataset = get_engine(self._trainer()), self.source.train()
        self._stream = TrainingStream(
            accumulation=self._accumulation,
            order=self._order(dataset),
            make_loader=lambda sampler: self._loader(self._drawn(dataset), self.source, batch_sampler=sampler),
            count=self._loss.counts,
            counts_of_sample=self._loss.counts_of_sample(dataset.targets_per_sample),
            count_inputs=getattr(dataset, "count_inputs", None),
            count_images=getattr(dataset, "count_images", None),
            rank=engine.data_rank,
            world_size=engine.data_size,
            sum_over_ranks=engine.sum_over_data_ranks,
            position=self.position,
            looks_ahead=self.looks_ahead,
            draws=has_draws(dataset),
        )
        return self._stream

    @override
    def val_dataloader(self) -> DataLoader[Batch] | list[DataLoader[Batch]]:
        """Return the loader of the validation split, or a list that also has those of additional validation sets."""
        if self._period is not None:
            dataset = self.source.train()
            order, positions = self._order(dataset), np.arange(self._period)
            first = order.places(positions) if has_draws(dataset) else order.indices(positions)  # [period, 2], [period]
            repeated: Any = Subset(self._drawn(dataset), first.tolist())
            return self._loader(self._rank_share(repeated, of=dataset), self.source)
        loaders = []
        for source in (self.source, *self.eval_sources.values()):
            dataset = source.val()
            share = self._rank_share(_spread_evenly(dataset, self._eval_samples), of=dataset)
            loaders.append(self._loader(share, source))
        return loaders if self.eval_sources else loaders[0]

    def describe_validation(self, source: DataSource) -> str:
        """Return how many of the validation samples of a source a validation reads, for the log; empty: all."""
        num_samples = len(source.val())
        if self._period is not None or self._eval_samples is None or self._eval_samples >= num_samples:
            return ""
        part = f"{self._eval_samples:,} of {num_samples:,} samples"
        return f"; each validation reads {part} (eval_samples=null: all)"

    @property
    def eval_names(self) -> list[str]:
        """Names of the additional validation sets, in the order of their loaders."""
        return [] if self._period is not None else list(self.eval_sources)

    def get_split(self, split: str) -> Any:
        """Return all samples of a split of the data: train, val, test or predict.

        Raises:
            ConfigError: The data has no such split.
        """
        found = getattr(self.source, split, lambda: None)()
        if found is None and split == "predict":
            reason = f"{type(self.source).__name__} has none"
            fix = "data.path=<new texts> of a run on texts, or 'data.predict={_target_: <its class>}' of data=dataset"
            raise ConfigError("mode.split=predict", reason, fix)
        if found is None:
            reason = f"{type(self.source).__name__} keeps no part of the data for it"
            fix = "mode=evaluate or mode.split=val, or data=dataset with 'data.test={_target_: <its class>}'"
            raise ConfigError("the test split", reason, fix)
        return found

    def split_dataloaders(self, split: str, *, alone: bool = False) -> list[DataLoader[Batch]]:
        """Return loaders of complete splits, for `mode=evaluate`; for "val", including additional validation sets.

        Nothing is drawn: training samples are as they are by index. Arguments: see `prepare_split`.
        """
        further = self.eval_sources.values() if split == "val" and not alone else ()
        splits = [(self.source, self.get_split(split)), *((source, source.val()) for source in further)]
        return [self._loader(self._rank_share(dataset, of=dataset), source) for source, dataset in splits]

    def list_datasets(self) -> list[tuple[Any, DataSource]]:
        """Return every dataset that a run reads, training first, with its source."""
        return [(self.source.train(), self.source), (self.source.val(), self.source)] + [
            (source.val(), source) for source in self.eval_sources.values()
        ]

    def load_samples(self, dataset: Any, source: DataSource, indices: range) -> DataLoader[Batch]:
        """Return a loader of this rank's part of some samples of a dataset, each as it is by index."""
        return self._loader(self._rank_share(Subset(dataset, indices), of=dataset), source)

    def load_further(self, dataset: Any) -> DataLoader[Batch]:
        """Return a loader of this rank's part of samples that are of no split of the data, collated by default."""
        return self._loader(self._rank_share(dataset, of=dataset), None)

    def count_source_tokens(self) -> dict[str, int]:
        """Return the tokens consumed so far from each source of a mixture; empty for other data."""
        dataset: Any = self.source.train()
        return dataset.count_tokens(self.position, seed=self._seed) if hasattr(dataset, "count_tokens") else {}

    def count_new_samples(self) -> int:
        """Return the number of samples that the stream yields before the first repetition."""
        dataset: Any = self.source.train()
        return dataset.count_new() if hasattr(dataset, "count_new") else len(dataset)

    def describe_epochs(self, num_samples: int) -> str:
        """Describe the number of epochs in the first `num_samples` samples of the stream, for the log."""
        dataset: Any = self.source.train()
        if not hasattr(dataset, "count_epochs"):
            return f"{num_samples / len(dataset):.3g} epochs"
        parts = [f"{epochs:.3g} of {name}" for name, epochs in dataset.count_epochs(num_samples).items()]
        return f"epochs: {', '.join(parts)}"

    @override
    def state_dict(self) -> dict[str, Any]:
        validation = {"validation": self._validation_identity()}
        described = {"class_names": self.class_names, "statistics": getattr(self.source, "statistics", None)}
        return {"position": self.position} | described | self._stream_identity() | validation

    @override
    def teardown(self, stage: str) -> None:
        self.log_skipped()

    def log_skipped(self) -> None:
        """Log how many samples of each source were replaced because they cannot be read, if any were."""
        for source in (self.source, *self.eval_sources.values()):
            if skipped := getattr(source, "describe_skipped", lambda: "")():
                LOGGER.warning("data: %s", skipped)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._check_classes(state_dict.get("class_names"))
        self._restore_statistics(state_dict)
        self.restore_position(state_dict)
        if state_dict["validation"] != self._validation_identity():
            LOGGER.warning(
                "The validation split differs from that of the checkpoint: val/loss up to here and from here on is"
                " measured on different samples, and `best` compares the two; checkpoint.keep_best=0 keeps no best"
                " checkpoint"
            )

    def restore_names(self, state_dict: dict[str, Any]) -> None:
        """Take the names of the classes, and how inputs are scaled, from a checkpoint, whose data need not be there."""
        self._recorded_names = state_dict.get("class_names")  # earlier ones have none
        self._restore_statistics(state_dict)

    def _restore_statistics(self, state_dict: dict[str, Any]) -> None:
        if (statistics := state_dict.get("statistics")) is not None and hasattr(self.source, "use_statistics"):
            self.source.use_statistics(statistics)

    def _check_classes(self, recorded: list[str] | None) -> None:
        """Check that the classes of the data are those of a checkpoint, number by number, where both are known.

        Raises:
            ConfigError: They differ, so that what the model learned as one class is another one here.
        """
        names = getattr(self.source, "class_names", None)
        if recorded is None or names is None or [*names] == [*recorded]:
            return
        if len(names) != len(recorded):
            reason = f"it has {count(len(names), 'class', 'classes')}, and the run was trained on {len(recorded)}"
        else:
            number = next(place for place, name in enumerate(names) if name != recorded[place])
            reason = f"its class {number} is {names[number]!r}, and the run was trained on {recorded[number]!r} there"
        fix = "the data with the classes of the run, or start_from=<the run> without resume= for a new one on these"
        raise ConfigError("data", reason, fix)

    def restore_position(self, state_dict: dict[str, Any]) -> None:
        """Continue at the position of a checkpoint; log if it now refers to other samples."""
        position = state_dict["position"]
        if type(position) is not int or not 0 <= position < 2**62:
            raise ValueError(f"the position in the data is {str(position)[:40]}, not a count")
        self.move_to(position)
        current = self._stream_identity()
        changed = [f"{key} {state_dict[key]} -> {current[key]}" for key in current if current[key] != state_dict[key]]
        if changed:
            LOGGER.warning(
                "The training data differs from that of the checkpoint (%s): position %d now refers to different"
                " samples",
                ", ".join(changed),
                self.position,
            )

    def samples_of_step(self, position: int) -> list[dict[str, Any]]:
        """Return the samples of one optimizer step, with their index in the step, the stream and the data.

        A random sample has `draw`, the arguments of `rng_at`, with which the dataset draws it again.

        Args:
            position: Samples consumed at the end of the step.
        """
        accumulation, dataset = self._accumulation, self.source.train()
        order = self._order(dataset)
        first = position - accumulation.global_batch_size
        found = order.places(np.arange(first, position)).tolist()
        places = itertools.product(
            range(accumulation.num_micro_batches),
            range(get_engine(self._trainer()).data_size),
            range(accumulation.micro_batch_size),
        )
        describe: Any = getattr(self.source, "describe_sample", lambda _: {})
        describe_drawn: Any = getattr(self.source, "describe_drawn", lambda sample, _: describe(sample))
        samples = []
        for offset, (micro_batch, rank, row) in enumerate(places):
            sample, drawn_at = found[offset]
            place: dict[str, Any] = {"rank": rank, "micro_batch": micro_batch, "row": row}
            if has_draws(dataset):
                place["draw"] = {"seed": self._seed, "position": drawn_at}
            described = describe_drawn(sample, rng_at(self._seed, drawn_at)) if has_draws(dataset) else describe(sample)
            samples.append({"position": first + offset, "sample": sample} | place | described)
        return samples

    def skip_batches(self, num_steps: int) -> None:
        """Skip the samples of N optimizer steps; call between two steps."""
        self.move_to(self.position + num_steps * self._accumulation.global_batch_size)

    def move_to(self, position: int) -> None:
        """Continue at another position of the stream; call between two steps. Loader processes are restarted."""
        self._start_position = position
        if self._stream is not None:
            self._stream.move_to(position)

    def _stream_identity(self) -> dict[str, Any]:
        """Return the settings that determine which sample is at each position."""
        return {
            "seed": self._seed,
            "num_samples": len(self.source.train()),
            "fingerprint": self.source.fingerprint,
            "period": self._period,
        }

    def _validation_identity(self) -> str:
        """Return what determines the validation samples of the source."""
        return f"{get_val_fingerprint(self.source)}/{self._eval_samples}/{self._period}"

    def _warn_of_shared_texts(self) -> None:
        """Log, once, how many texts of the additional validation sets are trained on."""
        if self._has_warned or not hasattr(self.source, "split_texts"):
            return
        self._has_warned = True
        texts: Any = self.source.split_texts()
        texts = texts[np.lexsort((-texts["num_train"], texts["key"]))]
        keys, firsts = np.unique(texts["key"], return_index=True)
        num_train = texts["num_train"][firsts]  # the most of any copy
        for name, source in self.eval_sources.items():
            if len(keys) and hasattr(source, "split_texts"):
                held_out: Any = source.split_texts()
                held_out = held_out[held_out["num_train"] < held_out["num_tokens"]]
                place = np.minimum(np.searchsorted(keys, held_out["key"]), len(keys) - 1)
                is_shared = (keys[place] == held_out["key"]) & (num_train[place] > held_out["num_train"])
                if num_shared := int(is_shared.sum()):
                    LOGGER.warning(
                        "%d of the %s of eval_data.%s %s also trained on: its loss is too low",
                        *(num_shared, count(len(held_out), "validation text"), name),
                        "is" if num_shared == 1 else "are",
                    )

    def _order(self, dataset: Any) -> Order:
        order = dataset.make_order(self._seed) if hasattr(dataset, "make_order") else None
        order = order or ShuffledOrder(len(dataset), self._seed)
        return order if self._period is None else RepeatedOrder(order, period=self._period)

    def _drawn(self, dataset: Any) -> Any:
        """Return the samples of the stream, by index or, if they are random, by (index, position)."""
        return DrawnSamples(dataset, self._seed) if has_draws(dataset) else dataset

    def _rank_share(self, samples: Any, *, of: Any) -> RankShare:
        """Return this rank's part of some samples of a dataset."""
        engine = get_engine(self._trainer())
        return RankShare(samples, rank=engine.data_rank, world_size=engine.data_size, of=of)

    def _loader(self, dataset: Any, source: DataSource | None, **order: Any) -> DataLoader[Batch]:
        on_gpu = get_engine(self._trainer()).root_device.type == "cuda"
        workers = self._num_workers
        if workers is None:
            workers = _choose_workers() if on_gpu else 0
        if "batch_sampler" not in order:
            order |= {"batch_size": self._accumulation.micro_batch_size}
        return SignalProofLoader(
            dataset,
            **order,
            collate_fn=getattr(source, "collate", None),  # None: the default collate stacks samples
            num_workers=workers,
            pin_memory=on_gpu,
            persistent_workers=workers > 0,
            prefetch_factor=4 if workers else None,
            # separate generator: the loader draws a base seed, which must not come from the global RNG
            generator=torch.Generator().manual_seed(self._seed),
        )

    def _trainer(self) -> lightning.Trainer:
        assert self.trainer is not None, "the loaders need the Trainer's ranks and device"
        return self.trainer


def _has_any_loss(target: torch.Tensor) -> bool:
    """Return whether some number of a target is known: not NaN, and not -100 of a class."""
    known = ~target.isnan() if target.is_floating_point() else target != IGNORE_INDEX
    return bool(known.any())


@functools.cache  # log once, however many loaders there are
def _choose_workers() -> int:
    """Return the number of loader processes per GPU rank."""
    cores = num_cores()
    if cores < GPU_WORKERS:
        LOGGER.info(
            "This rank has %d of the machine's %d cores: %d instead of %d loader processes. More of them:"
            " launcher.cpus_per_task=%d, or srun --cpus-per-task=%d",
            *(cores, os.cpu_count() or 1, cores, GPU_WORKERS, 2 * GPU_WORKERS, 2 * GPU_WORKERS),
        )
    return min(GPU_WORKERS, cores)


def _spread_evenly(dataset: SampleDataset, num_samples: int | None) -> Any:
    """Return `num_samples` evenly spaced samples of a dataset, or all if it has fewer."""
    if num_samples is None or num_samples >= len(dataset):
        return dataset
    if hasattr(dataset, "spread"):
        return dataset.spread(num_samples)
    indexed: Any = dataset
    return Subset(indexed, [i * len(dataset) // num_samples for i in range(num_samples)])
