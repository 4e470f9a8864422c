"""Data sources, one file per option of conf/data, and the protocols they implement.

A source is prepared once, then returns a training and a validation dataset. This module does not import torch, so
processes that only tokenize start in a fraction of a second.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from recipes.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.random import Generator
    from torch import Tensor

    from recipes.tokenizer import Tokenizer


class SampleDataset(Protocol):
    """Samples by index, equal in every process: dicts of `inputs` [T] or [C, H, W] and `targets` [T] or [].

    Samples of packed documents also have `positions` [T], the position of each token in its document, 0 at its start.
    Samples that end with padding also have `num_inputs` [], the number of inputs that are tokens; a collate function
    that pads adds it, [B]. The dataset then has `count_inputs(samples)`, else none or None, which returns this number
    for an array of sample indices without reading the samples: every rank counts the tokens of the global batch with
    it. In the same way `count_images(samples)` returns the number of images that a language model reads with each.
    Other optional methods: `make_order(seed)` for a custom sample order, beside `num_reads` where that has each
    sample several times in an epoch; `spread(num_samples)` to choose a subset
    for validation other than evenly spaced samples; `padding()`, a sample without a loss, with which a rank fills up
    its part of a validation that does not divide evenly: needed without `targets`, of which -100 and NaN have no loss.

    Attributes:
        targets_per_sample: Targets with a loss in one sample; None if the number varies.
        tokens_per_sample: Input tokens in one sample, the most if the number varies; 0 if the samples are not text.
    """

    @property
    def targets_per_sample(self) -> int | None: ...
    @property
    def tokens_per_sample(self) -> int: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> dict[str, Tensor]: ...


class RandomSampleDataset(SampleDataset, Protocol):
    """Training samples that are random: augmented, masked, truncated, paired.

    The training stream calls `sample` in place of `__getitem__`, with a generator that depends on the seed of the run
    and the position in the stream alone: `recipes.data.draws.rng_at`. Every epoch then draws other numbers, and any
    number of ranks, loader processes and micro-batches, a resume and a dump of a bad step draw the same. Draw from
    nothing else, and keep nothing from one sample to the next. `__getitem__` gives the sample without a draw, to
    validations, `mode=evaluate` of the training split and plans; a validation that cannot do without, as of masked
    tokens, draws there from `rng_at(0, index)`. What `count_inputs` and `targets_per_sample` say holds for every draw.
    A dataset that draws only with some settings has `sample = None` otherwise, and loses nothing.

    Optional, `mix_pair(first, second, rng, position)`, or None: returns two neighbours of a micro-batch of training in
    the place of the samples at `position` and the next one, with a generator of the pair. A micro-batch then has an
    even size, so that any split of the stream holds the same pairs. Validations do not call it.
    """

    def sample(self, index: int, rng: Generator, /) -> dict[str, Tensor]: ...


class DataSource(Protocol):
    """One option of conf/data.

    Optional members: `test`, which returns the dataset of `mode=test`, or None, and `predict`, that of
    `mode=predict`, whose samples need no targets, with `has_new_samples`, whether there is one;
    `prepare_split(split)`, where splits are made apart from each other: a mode that reads one of them calls it in
    the place of `prepare`, and nothing of the others. `class_names`, a list of texts, where it knows them;
    `collate`, which makes a batch, a dict of tensors, of a list of samples; without it they have equal shapes and
    are stacked. `questions`, which returns questions and answers as tokens; `hold_out_all`, which makes all data
    validation data; `val_fingerprint`, like `fingerprint` for the validation samples alone; for text sources
    `corpus`, in which case `prepare` accepts a tokenizer to use instead of the source's own; and `split_texts` with
    `hold_out`, by which sources of equal texts agree on one split.

    A batch of training also has `num_samples`, the samples that it was made of, whatever the rows of its tensors are.

    Attributes:
        sample_kind: Kind of its samples, such as "tokens", "images" or "tensors": that of the model and the task. A
            plain literal, because the config check reads it from source; "{kind}" is the value of the setting `kind`.
        deferred: Optional plain literal: names of arguments that are sections with a `_target_`, which are given as
            functions that build them, for what must not be built before `prepare`.
        has_answers: Optional plain literal: True if it holds questions and their answers.
        pads_samples: Optional plain literal: True if samples end with padding, so that a plan cannot count tokens.
        tokenizer: Tokenizer of the text; None if the samples are not text or the tokenizer is unknown.
    """

    sample_kind: ClassVar[str]

    @property
    def tokenizer(self) -> Tokenizer | None: ...
    def prepare(self) -> None:
        """Download, tokenize or check what is needed; called in every process, and cached."""

    @property
    def fingerprint(self) -> str:
        """String that is equal for equal samples, independent of the seed; after `prepare`."""

    def describe(self) -> str:
        """Return the amount of data as one log line; after `prepare`."""

    def train(self) -> SampleDataset: ...
    def val(self) -> SampleDataset: ...


# members -> what to write in the class, where it lacks them
_OF_SOURCE = {
    "prepare": "def prepare(self): …",
    "train": "def train(self): …, which returns the training dataset",
    "val": "def val(self): …, which returns that of validation",
    "fingerprint": "self.fingerprint = <a text that changes with the samples>, in prepare",
    "describe": "def describe(self): …, which returns a line for the log",
    "tokenizer": "tokenizer = None",
}
_OF_DATASET = {
    "__len__": "def __len__(self): …",
    "__getitem__": 'def __getitem__(self, index): …, which returns {"inputs": …, "targets": …}',
}
_OF_TRAINING = {
    "targets_per_sample": "targets_per_sample = 1, or None if the number varies"
}  # read of no other dataset


def prepare_with(source: Any, tokenizer: Tokenizer | None, *, split: str | None = None) -> None:
    """Prepare a data source, with this tokenizer if one is given and the source reads text.

    Args:
        source: A data source.
        tokenizer: Tokenizer to use in place of its own; None: its own.
        split: The only split that is read, so that others need not be there; None: those of training.

    Raises:
        ConfigError: It, or a dataset of it, lacks a member of its protocol; all that are missing are named.
    """
    _check_members("data", source, ("prepare",))
    if split is not None and hasattr(source, "prepare_split"):
        source.prepare_split(split)
        return
    if tokenizer is not None and hasattr(source, "corpus"):
        source.prepare(tokenizer)
    else:
        source.prepare()
    _check_members("data", source, _OF_SOURCE)
    for name, needed in (("train", _OF_DATASET | _OF_TRAINING), ("val", _OF_DATASET)):
        if split is None or name == split:  # of other data, all of which is held out, there is no training split
            origin = f", the dataset of {type(source).__name__}.{name}(),"
            _check_members("data", getattr(source, name)(), needed, origin=origin)


def _check_members(section: str, value: Any, needed: Iterable[str], *, origin: str = "") -> None:
    """Check that an object has these members, without reading a property."""
    missing = [name for name in needed if not (hasattr(type(value), name) or hasattr(value, name))]
    if missing:
        name = type(value).__name__
        reason = f"{name}{origin} has no {' and no '.join(missing)}, see docs/reference/protocols.md"
        fix = "; ".join((_OF_SOURCE | _OF_DATASET | _OF_TRAINING)[member] for member in missing)
        raise ConfigError(f"{section}._target_={type(value).__module__}.{name}", reason, f"in the class {name}: {fix}")


def get_val_fingerprint(source: Any) -> str:
    """Return a string that is equal for equal validation samples; after `prepare`."""
    return str(getattr(source, "val_fingerprint", None) or source.fingerprint)


@contextmanager
def in_section(section: str) -> Iterator[None]:
    """Replace `data` in the errors of a data source by the config section it is in."""
    try:
        yield
    except ConfigError as error:
        raise error.in_section(section) from error
