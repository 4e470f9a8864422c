"""Reproducible random tokens instead of text, to measure speed and memory: ~10 ns per token, no files."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import Tensor

from recipes.data.full_windows import FullWindows
from recipes.data.order import mix64
from recipes.errors import ConfigError
from recipes.tokenizer import Tokenizer

_VAL_STREAM = 1 << 62  # validation counts its tokens from here, training from 0


class NoiseWindows(FullWindows):
    """Sample i has L inputs and L targets from L + 1 uniform random tokens that depend only on (seed, i).

    Args:
        num_samples: Number of distinct samples.
        vocab_size: Tokens are in [0, vocab_size).
        seq_len: L, tokens per sample.
        seed: Seed of the random tokens.
        first_token: Offset in the random stream, which keeps two datasets with the same seed distinct.
    """

    def __init__(self, *, num_samples: int, vocab_size: int, seq_len: int, seed: int, first_token: int) -> None:
        self.num_samples = num_samples
        self.vocab_size = vocab_size
        super().__init__(seq_len)
        self.seed = seed
        self.first_token = first_token

    def __len__(self) -> int:
        """Return the number of distinct samples."""
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one sample: inputs and targets, [L] int64."""
        if not -self.num_samples <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        begin = self.first_token + index % self.num_samples * (self.seq_len + 1)
        counters = np.arange(begin, begin + self.seq_len + 1, dtype=np.uint64)  # [L+1]
        key = mix64(np.array([self.seed & ((1 << 64) - 1)], dtype=np.uint64))
        noise = mix64(mix64(counters) ^ key)
        tokens = torch.from_numpy((noise % np.uint64(self.vocab_size)).astype(np.int64))  # [L+1]
        return {"inputs": tokens[:-1], "targets": tokens[1:]}


@dataclass(kw_only=True)
class RandomTokens:
    """Uniform random tokens; by construction, the loss cannot fall below log(vocab_size).

    Args:
        vocab_size: Tokens are in [0, vocab_size).
        seq_len: Tokens per sample.
        num_samples: Training samples in one epoch.
        num_val_samples: Validation samples, which differ from the training samples.
        seed: Seed of the random tokens; the order of samples depends on the seed of the run.

    Raises:
        ConfigError: A setting is not positive.
    """

    sample_kind: ClassVar[str] = "tokens"
    tokenizer: ClassVar[Tokenizer | None] = None  # the tokens have no meaning

    vocab_size: Annotated[int, ">= 1"]
    seq_len: Annotated[int, ">= 1"]
    num_samples: Annotated[int, ">= 1"]
    num_val_samples: Annotated[int, ">= 1"] = 64
    seed: Annotated[int, ">= 0"] = 0

    def __post_init__(self) -> None:
        for name in ("seq_len", "data.vocab_size", "data.num_samples", "data.num_val_samples"):
            value = getattr(self, name.removeprefix("data."))
            if value < 1:
                raise ConfigError(f"{name}={value}", "random tokens need at least 1", f"{name}=256")

    def prepare(self) -> None:
        """Do nothing: there are no files."""

    @property
    def fingerprint(self) -> str:
        """All settings that the tokens depend on."""
        return f"noise/{self.vocab_size}/{self.seq_len}/{self.seed}"

    def describe(self) -> str:
        """Return the number of samples."""
        return f"{self.num_samples:,} samples of {self.seq_len} random tokens, for measurements of speed only"

    def train(self) -> NoiseWindows:
        """Return the training samples."""
        return self._windows(num_samples=self.num_samples, first_token=0)

    def val(self) -> NoiseWindows:
        """Return the validation samples."""
        return self._windows(num_samples=self.num_val_samples, first_token=_VAL_STREAM)

    def _windows(self, *, num_samples: int, first_token: int) -> NoiseWindows:
        return NoiseWindows(
            num_samples=num_samples,
            vocab_size=self.vocab_size,
            seq_len=self.seq_len,
            seed=self.seed,
            first_token=first_token,
        )
