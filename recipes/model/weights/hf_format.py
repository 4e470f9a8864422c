"""Mapping of our parameters and settings to the tensors and config keys of published weights."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, get_args

import torch
from torch import Tensor, nn

from recipes.errors import ConfigError
from recipes.model.decoder import Decoder
from recipes.model.init import named_parameters, pad_rows
from recipes.model.moe.router import Scores
from recipes.model.score import OF_HEADS

HFConfig = Mapping[str, Any]  # config.json
FITTING_FOLDER = "model.pretrained=<folder whose config.json describes its tensors>"
_OTHER_FOLDER = "model.pretrained=<folder with a valid config.json>"


_NUMBERS = ("_theta", "_eps", "_epsilon", "_factor")  # keys of numbers, which may be typed without a point


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

    def assemble(self, read: Callable[[str], Tensor], *, shape: torch.Size, setting: str) -> Tensor:
        """Assemble our tensor, with the given `shape`.

        Args:
            read: Reads a tensor from the file by name.
            shape: Shape of our parameter, padding included.
            setting: The override that named the file, `key=value`.

        Raises:
            ConfigError: The shapes in the file do not match.
        """
        parts = [read(name) for name in self.published]
        inner = shape[2:] if self.stacked else shape[1:]
        for name, part, num_rows in zip(self.published, parts, self.rows, strict=True):
            expected = (num_rows, *inner)
            expected = expected[::-1] if self.transposed else expected
            if tuple(part.shape) != expected:
                reason = f"its {name} has the shape {tuple(part.shape)}, and its config.json describes {expected}"
                raise ConfigError(setting, reason, FITTING_FOLDER)
        if self.transposed:
            parts = [part.t() for part in parts]
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
        fix: What to type where `ours` is None; None: a model of transformers, which has every setting.
        least: Least value of a whole number.
        is_optional: Whether null is a value of our setting.
    """

    key: str
    value: object
    ours: str | None
    fix: str | None = None
    least: int = 1
    is_optional: bool = False

    def difference(self, config: HFConfig) -> tuple[str, str | None] | None:
        """Return what differs, and what to type instead (None: see `fix`); None if the values agree."""
        if self.key not in config:
            return f"config.json has no {self.key}, which this model needs", self.fix
        found = config[self.key]
        if found == self.value:
            return None
        published = _yaml(found)
        if self.ours is None:
            return f"the weights have {self.key}={published}, and this model only {_yaml(self.value)}", self.fix
        if not self._is_possible(found):
            return f"config.json has {self.key}={published}, which no model can have", _OTHER_FOLDER
        return f"{self.ours}={_yaml(self.value)}: the weights have {self.key}={published}", f"{self.ours}={published}"

    def _is_possible(self, found: object) -> bool:
        """Return whether our setting takes a value, as far as this is known without the others."""
        if found is None:
            return self.is_optional
        if isinstance(self.value, bool) or isinstance(found, bool):
            return isinstance(self.value, bool) and isinstance(found, bool)
        if isinstance(self.value, str):
            return found in get_args(Scores)  # the only names that are settings of ours
        if isinstance(self.value, int) and not self.key.endswith(_NUMBERS):
            return isinstance(found, int) and self.least <= found < 2**31
        return isinstance(found, int | float) and 0 < found < math.inf


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def whole_number(config: HFConfig, key: str) -> int:
    """Return a size that others are computed from.

    Raises:
        ValueError: The config has no such size, or one that no model can have.
    """
    found = config.get(key)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ValueError(f"{key} is {_yaml(found)} instead of a whole number above 0")
    return found


class Format(Protocol):
    """The published form of one architecture.

    Attributes:
        model: Our model.
        kinds: Supported values of `model_type`.
        outside: Published names of modules outside the blocks.
        blocks: Published name of the list of blocks.
    """

    model: Decoder
    kinds: ClassVar[tuple[str, ...]]
    outside: ClassVar[dict[str, str]]
    blocks: ClassVar[str]

    def entries(self) -> list[Entry]:
        """Return every parameter of a language model, tied ones once, and every published buffer."""
        entries = []
        for name, parameter in named_parameters(self.model):
            if name in OF_HEADS:  # a language model is published without
                continue
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
        """Return `config` with transformers' defaults for missing keys.

        Raises:
            Exception: Of whatever kind, if a value is none that a model can have.
        """

    def full_name(self, name: str) -> str | None:
        """Return the name that `entries` uses for a tensor in the file; None if the tensor is not a weight."""

    def config(self) -> dict[str, Any]:
        """Return the model's config.json, without dtype and special tokens."""
