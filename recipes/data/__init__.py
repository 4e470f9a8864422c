"""The contract of a data source: where samples come from; one file per option of conf/data.

A source is prepared once, then gives a training and a validation dataset. This package imports no torch, so that
processes that only tokenize start in a fraction of a second.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from recipes.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from recipes.tokenizer import Tokenizer


class SampleDataset(Protocol):
    """Samples by index, equal in every process: dicts of `inputs` [T] or [C, H, W] and `targets` [T] or [].

    Where several documents are packed into a sample, also `positions` [T], of each token in its own: 0 begins one.
    A dataset with an order of its own has a method `make_order`, of a seed; one that is not to be thinned out evenly
    for validation, a method `spread`, of a number of samples.

    Attributes:
        targets_per_sample: Targets that carry loss in one sample; None if it varies.
        tokens_per_sample: Tokens the model reads in one sample; 0 if the samples are no text.
    """

    @property
    def targets_per_sample(self) -> int | None: ...
    @property
    def tokens_per_sample(self) -> int: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> dict[str, Tensor]: ...


class DataSource(Protocol):
    """One option of conf/data.

    One whose samples differ in length has a method `collate` that makes a batch of them; one that knows questions and
    their answers, a method `questions` that returns both as tokens. One that reads text has a method `corpus`, and its
    `prepare` takes a tokenizer, to be used in place of its own.

    Attributes:
        sample_kind: "tokens" or "images"; a plain literal, because the config check reads it from source.
        tokenizer: Of the text; None if the samples are no text or the tokenizer is unknown.
    """

    sample_kind: ClassVar[str]

    @property
    def tokenizer(self) -> Tokenizer | None: ...
    def prepare(self) -> None:
        """Download, tokenize or check what is needed; called in every process, and cached."""

    @property
    def fingerprint(self) -> str:
        """Equal for equal samples, whatever the seed; after `prepare`."""

    def describe(self) -> str:
        """Return the amount of data as one line of the log; after `prepare`."""

    def train(self) -> SampleDataset: ...
    def val(self) -> SampleDataset: ...


def prepare_with(source: Any, tokenizer: Tokenizer | None) -> None:
    """Prepare a data source, with this tokenizer if there is one and the source reads text."""
    if tokenizer is not None and hasattr(source, "corpus"):
        source.prepare(tokenizer)
    else:
        source.prepare()


@contextmanager
def in_section(section: str) -> Iterator[None]:
    """Name the section of a data source in its mistakes, which it takes for `data`."""
    try:
        yield
    except ConfigError as error:
        setting, fix = (text.replace("data.", f"{section}.") for text in (error.setting, error.fix))
        raise ConfigError(setting, error.reason, fix) from error
