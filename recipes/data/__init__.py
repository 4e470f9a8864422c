"""Where samples come from and in which order; a file is an option of conf/data or a part of one.

A source has `prepare()`, then `train()` and `val()`, which give datasets of the kind below. This
package imports no torch, so that the processes that only tokenize start in a fraction of a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from recipes.tokenizer import Tokenizer


class SampleDataset(Protocol):
    """Samples by index, the same whoever asks.

    Attributes:
        targets_per_sample: Targets that carry loss in one sample; None where it varies.
        tokens_per_sample: Tokens the model reads in one sample; 0 where there is no text.
    """

    @property
    def targets_per_sample(self) -> int | None: ...
    @property
    def tokens_per_sample(self) -> int: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> dict[str, Tensor]: ...


class DataSource(Protocol):
    """One option of conf/data.

    Attributes:
        sample_kind: "tokens" or "images"; a plain literal, because it is read without importing.
    """

    sample_kind: ClassVar[str]

    @property
    def tokenizer(self) -> Tokenizer | None: ...
    def prepare(self) -> None: ...
    @property
    def fingerprint(self) -> str:
        """The same for the same samples, whatever the seed; after `prepare`."""

    def describe(self) -> str:
        """How much there is, in one line of the log; after `prepare`."""

    def train(self) -> SampleDataset: ...
    def val(self) -> SampleDataset: ...
