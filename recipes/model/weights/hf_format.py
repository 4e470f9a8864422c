"""Our parameters and settings beside the published tensors and keys they correspond to. Free."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recipes.model.init import pad_rows

HFConfig = Mapping[str, Any]  # config.json


@dataclass(frozen=True)
class Entry:
    """Our parameter `name`: published tensors one under another, then zero rows as padding.

    Attributes:
        name: In `model.named_parameters()`.
        published: Tensor names in the file.
        rows: Rows of ours that each of them fills.
        transposed: The file holds [in, out] (GPT-2's Conv1D), we hold [out, in].
    """

    name: str
    published: tuple[str, ...]
    rows: tuple[int, ...]
    transposed: bool = False

    def assemble(self, read: Callable[[str], Tensor], *, shape: torch.Size) -> Tensor:
        """Our tensor, from a function that reads one of the file's."""
        parts = [read(name) for name in self.published]
        if self.transposed:
            parts = [part.t() for part in parts]
        found = tuple(len(part) for part in parts)
        if found != self.rows or any(part.shape[1:] != shape[1:] for part in parts):
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise ValueError(
                f"{' + '.join(self.published)} of shape {shapes} cannot fill {self.name} of shape "
                f"{tuple(shape)}: the file is not what its config.json describes; "
                "type model.pretrained=<another folder>"
            )
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return pad_rows(whole, num_rows=shape[0])

    def publish(self, parameter: Tensor) -> dict[str, Tensor]:
        """The file's tensors, from ours: contiguous copies on the CPU, padding left out."""
        whole = parameter.detach().cpu()[: sum(self.rows)]
        parts = torch.split(whole, list(self.rows))
        if self.transposed:
            parts = tuple(part.t() for part in parts)
        copies = (part.clone(memory_format=torch.contiguous_format) for part in parts)
        return dict(zip(self.published, copies, strict=True))


@dataclass(frozen=True)
class Setting:
    """What config.json must say for weights to fit.

    Attributes:
        key: In config.json.
        value: What our model is.
        ours: The override's name, `model.num_layers`; None: no override makes the two agree.
    """

    key: str
    value: object
    ours: str | None

    def difference(self, config: HFConfig) -> str | None:
        """One line in three clauses, or None where they agree."""
        if self.key not in config:
            return f"config.json has no {self.key}, which this model needs; type another model=…"
        theirs = config[self.key]
        if theirs == self.value:
            return None
        shown = _yaml(theirs)
        if self.ours is None:
            return f"{self.key}={shown}: this model is only {self.value}; type another model=…"
        mine = _yaml(self.value)
        return f"{self.ours}={mine}: the weights have {self.key}={shown}; type {self.ours}={shown}"


def _yaml(value: object) -> str:
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


class Format(Protocol):
    """How one architecture of ours is published."""

    def entries(self) -> list[Entry]:
        """Every parameter, tied ones once."""

    def settings(self, config: HFConfig) -> list[Setting]:
        """What `config`, completed by `with_defaults`, must say."""

    def with_defaults(self, config: HFConfig) -> HFConfig:
        """`config` with the values transformers takes where a key is absent."""

    def full_name(self, name: str) -> str | None:
        """The name `entries` uses for a tensor in the file; None: a tensor that is no weight."""

    def config(self) -> dict[str, Any]:
        """config.json of the model, without dtype and special tokens."""


def vocab_entry(name: str, *, published: str, vocab_size: int) -> Entry:
    """A parameter with one row a token, padded in ours."""
    return Entry(name, (published,), (vocab_size,))


def plain_entry(
    name: str, *, published: str, parameter: nn.Parameter, transposed: bool = False
) -> Entry:
    """A parameter that is one published tensor."""
    return Entry(name, (published,), (parameter.shape[0],), transposed)
