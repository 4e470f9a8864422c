"""Mapping of our parameters and settings to the tensors and config keys of published weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from recipes.model.decoder import Decoder
from recipes.model.init import named_parameters, pad_rows

HFConfig = Mapping[str, Any]  # config.json


@dataclass(frozen=True)
class Entry:
    """One parameter or buffer of ours: published tensors concatenated along rows, then zero rows as padding.

    Attributes:
        name: Name in `model.named_parameters()` or `model.named_buffers()`.
        published: Tensor names in the weight file.
        rows: Number of our rows that each published tensor fills.
        transposed: The file stores [in, out] (GPT-2's Conv1D), we store [out, in].
        stacked: We stack the published tensors along a new axis, [E, out, in].
    """

    name: str
    published: tuple[str, ...]
    rows: tuple[int, ...]
    transposed: bool = False
    stacked: bool = False

    def assemble(self, read: Callable[[str], Tensor], *, shape: torch.Size) -> Tensor:
        """Assemble our tensor, with the given `shape`.

        Args:
            read: Reads a tensor from the file by name.
            shape: Shape of our parameter, padding included.

        Raises:
            ValueError: The shapes in the file do not match.
        """
        parts = [read(name) for name in self.published]
        if self.transposed:
            parts = [part.t() for part in parts]
        found = tuple(len(part) for part in parts)
        inner = shape[2:] if self.stacked else shape[1:]
        if found != self.rows or any(part.shape[1:] != inner for part in parts):
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise ValueError(
                f"{' + '.join(self.published)} of shape {shapes} cannot fill {self.name} of shape "
                f"{tuple(shape)}: the file is not what its config.json describes; "
                "type model.pretrained=<another folder>"
            )
        rows = torch.stack(parts) if self.stacked else parts[0] if len(parts) == 1 else torch.cat(parts)
        return pad_rows(rows, num_rows=shape[0])

    def publish(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the published tensors by name: contiguous CPU copies without padding."""
        whole = parameter.detach().cpu()
        unpadded = (whole.flatten(0, 1) if self.stacked else whole)[: sum(self.rows)]
        parts = torch.split(unpadded, list(self.rows))
        if self.transposed:
            parts = tuple(part.t() for part in parts)
        copies = (part.clone(memory_format=torch.contiguous_format) for part in parts)
        return dict(zip(self.published, copies, strict=True))


@dataclass(frozen=True)
class Setting:
    """A config.json key and the value that matches our model.

    Attributes:
        key: Key in config.json.
        value: Value that matches our model.
        ours: Name of our setting, such as `model.num_layers`; None if no setting can make the two agree.
    """

    key: str
    value: object
    ours: str | None

    def difference(self, config: HFConfig) -> str | None:
        """Return one line in three clauses (problem, reason, fix); None if the values agree."""
        if self.key not in config:
            return f"config.json has no {self.key}, which this model needs; type another model=…"
        if config[self.key] == self.value:
            return None
        published = _yaml(config[self.key])
        if self.ours is None:
            return f"{self.key}={published}: this model is only {self.value}; type another model=…"
        return f"{self.ours}={_yaml(self.value)}: the weights have {self.key}={published}; type {self.ours}={published}"


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


class Format(Protocol):
    """The published form of one architecture.

    Attributes:
        model: Our model.
        outside: Published names of modules outside the blocks.
        blocks: Published name of the list of blocks.
    """

    model: Decoder
    outside: ClassVar[dict[str, str]]
    blocks: ClassVar[str]

    def entries(self) -> list[Entry]:
        """Return every parameter, tied ones once, and every published buffer."""
        entries = []
        for name, parameter in named_parameters(self.model):
            module, _, kind = name.rpartition(".")
            if module in self.outside:
                # all others have one row per token id, and we pad the vocabulary
                rows = parameter.shape[0] if module in ("norm", "position") else self.model.vocab_size
                entry = Entry(name, (f"{self.outside[module]}.{kind}",), (rows,))
            else:
                _, index, inner = module.split(".", 2)
                entry = self.block_entry(name, inner, parameter=parameter, block=f"{self.blocks}.{index}")
            entries.append(entry)
        return entries

    def block_entry(self, name: str, inner: str, *, parameter: nn.Parameter, block: str) -> Entry:
        """Return the entry for a block parameter.

        Args:
            name: Full name of the parameter.
            inner: Name of its module within the block.
            parameter: Our parameter.
            block: Published name of the block.
        """

    def settings(self, config: HFConfig) -> list[Setting]:
        """Return the values that `config`, completed by `with_defaults`, must contain."""

    def with_defaults(self, config: HFConfig) -> HFConfig:
        """Return `config` with transformers' defaults for missing keys."""

    def full_name(self, name: str) -> str | None:
        """Return the name that `entries` uses for a tensor in the file; None if the tensor is not a weight."""

    def config(self) -> dict[str, Any]:
        """Return the model's config.json, without dtype and special tokens."""
