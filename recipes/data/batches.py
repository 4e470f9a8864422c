"""Micro-batches of one rank: the endless training stream, and this rank's slice of a validation split.

Shapes: M micro-batches, B samples per micro-batch.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from recipes.data.order import Order, Positions
from recipes.errors import ConfigError
from recipes.numerics.accumulation import Accumulation
from recipes.numerics.loss import IGNORE_INDEX

Batch = dict[str, Any]
_BLOCK = 8192  # positions whose samples are looked up at a time


class PositionSampler(Sampler[list[Any]]):
    """Micro-batches of one rank, as lists of sample indices, from one stream shared by all ranks.

    Micro-batch m covers B * world_size consecutive positions, of which this rank has B. The stream itself does not
    depend on ranks, micro-batches or workers, so a run can resume at the next sample with different numbers of them.

    Args:
        order: Position -> sample index.
        start_position: Samples already consumed over all ranks.
        micro_batch_size: B.
        rank: Index of this process, from 0.
        world_size: Number of ranks that share the stream.
        num_micro_batches: Micro-batches to yield; None: endless, without a length.
        draws: Yield [index, position] in place of each index, for samples that are drawn.
    """

    def __init__(
        self,
        order: Order,
        *,
        start_position: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        num_micro_batches: int | None = None,
        draws: bool = False,
    ) -> None:
        assert start_position >= 0, start_position
        assert micro_batch_size > 0, micro_batch_size
        assert 0 <= rank < world_size, (rank, world_size)
        self.order = order
        self.start_position = start_position
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.world_size = world_size
        self.num_micro_batches = num_micro_batches
        self._draws = draws

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield lists of B sample indices, or B pairs of index and position, from `start_position` on."""
        stride = self.micro_batch_size * self.world_size
        begin = self.start_position + self.rank * self.micro_batch_size
        within = begin + np.arange(self.micro_batch_size, dtype=np.int64)  # [B]
        per_block = max(1, _BLOCK // self.micro_batch_size)
        done = 0
        while self.num_micro_batches is None or done < self.num_micro_batches:
            left = per_block if self.num_micro_batches is None else self.num_micro_batches - done
            numbers = done + np.arange(min(per_block, left), dtype=np.int64)  # [M]
            positions = numbers[:, None] * stride + within  # [M, B]
            found = self.order.places(positions) if self._draws else self.order.indices(positions)  # [M, B, 2], [M, B]
            yield from found.tolist()
            done += len(numbers)

    def __len__(self) -> int:
        """Return the number of micro-batches.

        Raises:
            TypeError: The stream is endless, so it has no length.
        """
        if self.num_micro_batches is None:
            raise TypeError("an endless stream has no length")
        return self.num_micro_batches


class TrainingStream:
    """Endless stream of this rank's micro-batches; without epoch ends, no accumulation window is partial.

    Args:
        accumulation: Global batch and micro-batches.
        order: Position in the stream -> sample.
        make_loader: Batch sampler -> loader of its micro-batches.
        count: Micro-batch -> its counts by name, 0-dim tensors on the host, which divide sums of the loss.
        counts_of_sample: Counts of every sample by name; None if they vary.
        count_inputs: Sample indices -> inputs of each sample, without padding; None if no sample is padded.
        count_images: Sample indices -> images of each sample; None if samples of text have none.
        rank: Index of this process, from 0.
        world_size: Number of ranks that share the stream.
        sum_over_ranks: Adds a tensor over all ranks.
        position: Samples already consumed over all ranks.
        looks_ahead: Whether to read a window before its first micro-batch is yielded, and to leave counting to the
            task, which may change the micro-batches.
        draws: Whether the loader takes pairs of index and position, as `PositionSampler` yields them.

    Attributes:
        position: As above; advances by a global batch when the last micro-batch of a window is yielded.
        window: Micro-batches of the current window, on the host; empty without `looks_ahead`.
    """

    def __init__(
        self,
        *,
        accumulation: Accumulation,
        order: Order,
        make_loader: Callable[[PositionSampler], Iterable[Batch]],
        count: Callable[[Batch], Mapping[str, Tensor]],
        counts_of_sample: Mapping[str, int] | None,
        count_inputs: Callable[[Positions], Positions] | None = None,
        count_images: Callable[[Positions], Positions] | None = None,
        rank: int,
        world_size: int,
        sum_over_ranks: Callable[[Tensor], Tensor],
        position: int,
        looks_ahead: bool = False,
        draws: bool = False,
    ) -> None:
        self.position = position
        self.window: list[Batch] = []
        self._looks_ahead = looks_ahead
        self._draws = draws
        self._has_moved = False
        self._accumulation = accumulation
        self._order = order
        self._make_loader = make_loader
        self._count = count
        self._counts_of_sample = counts_of_sample
        self._count_inputs = count_inputs
        self._count_images = count_images
        self._rank = rank
        self._world_size = world_size
        self._sum_over_ranks = sum_over_ranks

    def __iter__(self) -> Iterator[Batch]:
        while True:  # once, and again after every `move_to`
            self._has_moved = False
            begin = self.position
            for number, batch in enumerate(self._from_position()):
                if (number + 1) % self._accumulation.num_micro_batches == 0:
                    self.position += self._accumulation.global_batch_size
                yield batch | self._count_samples(begin, number)
                # the consumer may have moved the stream between two steps, for example in a rollback
                if self._has_moved:
                    break

    def __len__(self) -> int:
        # any length keeps Lightning from prefetching one batch
        return sys.maxsize

    def move_to(self, position: int) -> None:
        """Continue at another position; call between two optimizer steps. Loader processes are restarted."""
        self.position = position
        self._has_moved = True

    def make_sampler(self) -> PositionSampler:
        """Return what this rank reads from the current position on."""
        return PositionSampler(
            self._order,
            start_position=self.position,
            micro_batch_size=self._accumulation.micro_batch_size,
            rank=self._rank,
            world_size=self._world_size,
            draws=self._draws,
        )

    def _count_samples(self, begin: int, number: int) -> Batch:
        """Return what a micro-batch has, as host integers: its samples and, if samples are padded, its tokens.

        Tokens are those of all ranks, computed from positions rather than counted and summed: ranks then neither
        communicate nor wait for a device.

        Args:
            begin: Position of the first micro-batch.
            number: Micro-batches since then.

        Returns:
            `num_samples`, B, whatever a sample is: its tensors may have other numbers of rows. `num_tokens`, the inputs
            that are tokens, and `num_token_pairs`, the sum over samples of the squared number of inputs, to which the
            FLOPs of attention are proportional. `num_read_images`, those among the tokens of all ranks.
        """
        counts = {"num_samples": self._accumulation.micro_batch_size}
        if self._count_inputs is None and self._count_images is None:
            return counts
        stride = self._accumulation.micro_batch_size * self._world_size
        positions = begin + number * stride + np.arange(stride, dtype=np.int64)
        samples = self._order.indices(positions)  # [stride]
        if self._count_inputs is not None:
            lengths = self._count_inputs(samples)  # [stride]
            counts |= {"num_tokens": int(lengths.sum()), "num_token_pairs": int((lengths * lengths).sum())}
        if self._count_images is not None:
            counts["num_read_images"] = int(self._count_images(samples).sum())
        return counts

    def _from_position(self) -> Iterator[Batch]:
        accumulation, of_sample = self._accumulation, self._counts_of_sample
        micro_batches = self._make_loader(self.make_sampler())
        if self._looks_ahead:
            return self._keep_windows(micro_batches)
        of_window = {name: count * accumulation.global_batch_size for name, count in (of_sample or {}).items()}
        return with_counts(
            micro_batches,
            num_micro_batches=accumulation.num_micro_batches,
            count=self._count,
            counts_of_window=of_window or None,
            sum_over_ranks=self._sum_over_ranks,
        )

    def _keep_windows(self, micro_batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield micro-batches of an endless loader, each window after all of it has been read."""
        stream = iter(micro_batches)
        while window := list(islice(stream, self._accumulation.num_micro_batches)):
            self.window = window
            yield from window


def with_counts(
    micro_batches: Iterable[Batch],
    *,
    num_micro_batches: int,
    count: Callable[[Batch], Mapping[str, Tensor]],
    counts_of_window: Mapping[str, int] | None,
    sum_over_ranks: Callable[[Tensor], Tensor],
) -> Iterator[Batch]:
    """Add the counts of the global batch, such as `num_targets`, to each of its micro-batches.

    Dividing a sum of the loss by its count gives the exact gradient of one large batch under every engine, including
    those that do not expose gradients before reduction. If every sample has the same counts, nothing is read ahead;
    otherwise one window of micro-batches is read ahead, on the host.

    Args:
        micro_batches: This rank's micro-batches, in order.
        num_micro_batches: Micro-batches per window, that is, per optimizer step.
        count: Micro-batch -> its counts by name, 0-dim.
        counts_of_window: Counts of a global batch; None if they vary.
        sum_over_ranks: Adds a tensor over all ranks; called once per window if the counts vary.

    Yields:
        The micro-batches; those of a final partial window are dropped if the counts vary.
    """
    stream = iter(micro_batches)
    if counts_of_window is not None:
        for batch in stream:
            yield {**batch, **counts_of_window}
        return
    while len(window := list(islice(stream, num_micro_batches))) == num_micro_batches:
        totals = sum_counts([count(batch) for batch in window], sum_over_ranks)
        for batch in window:
            yield batch | totals


def sum_counts(counts: Sequence[Mapping[str, Tensor]], sum_over_ranks: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return the counts of a global batch by name, 0-dim.

    Args:
        counts: Counts of each micro-batch of this rank.
        sum_over_ranks: Adds a tensor over all ranks; called once.
    """
    names = list(counts[0])
    of_rank = [sum((of_batch[name] for of_batch in counts[1:]), start=counts[0][name]) for name in names]
    # float64 represents whole numbers up to 2^53 exactly, where other counts are not whole
    dtype = torch.float64 if any(total.is_floating_point() for total in of_rank) else torch.int64
    totals = sum_over_ranks(torch.stack([total.to(dtype) for total in of_rank]))  # [K]
    # a global batch without targets has loss 0 and gradient 0, not 0 / 0
    return dict(zip(names, torch.where(totals == 0, 1, totals).unbind(), strict=True))


class RankShare(Dataset[dict[str, Tensor]]):
    """Samples rank, rank + N, rank + 2N … of N ranks.

    If the samples do not divide evenly, the last ranks get one padding sample without a loss: forward passes of
    sharded models are collective, so every rank must run the same number of them.

    Args:
        dataset: The whole split.
        rank: Index of this process, from 0.
        world_size: N.
        of: Dataset of which these are some samples, and which makes the padding; None: `dataset`.

    Attributes:
        of: As above.
    """

    def __init__(self, dataset: Any, *, rank: int, world_size: int, of: Any = None) -> None:
        self._dataset = dataset
        self._rank = rank
        self._world_size = world_size
        self.of = dataset if of is None else of

    def __len__(self) -> int:
        return -(-len(self._dataset) // self._world_size)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        position = index * self._world_size + self._rank
        if position < len(self._dataset):
            sample: dict[str, Tensor] = self._dataset[position]
            return sample
        return make_padding(self.of)


def make_padding(dataset: Any) -> dict[str, Tensor]:
    """Return a sample without a loss: the dataset's own, or its first one without targets and tokens.

    Raises:
        ConfigError: It has no `padding()`, and its samples have no `targets`.
    """
    if hasattr(dataset, "padding"):
        own: dict[str, Tensor] = dataset.padding()
        return own
    sample: dict[str, Tensor] = dataset[0]
    if "targets" not in sample:
        raise ConfigError(
            "data=…",
            "samples do not divide evenly over the ranks, and what pads them is unknown: they have no `targets`",
            "trainer.devices=1, or give the dataset a method `padding()`, which returns a sample without a loss",
        )
    targets = torch.as_tensor(sample["targets"])
    empty = {"targets": torch.full_like(targets, torch.nan if targets.is_floating_point() else IGNORE_INDEX)}
    if "num_inputs" in sample:
        empty["num_inputs"] = torch.zeros_like(torch.as_tensor(sample["num_inputs"]))
    return sample | empty
