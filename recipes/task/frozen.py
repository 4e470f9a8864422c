"""Frozen weights that no checkpoint holds: of a model beside the trained one, and those beside an adapter.

A checkpoint has their identity instead, and a resume beside other weights is rejected.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from recipes.errors import ConfigError

_KEY = re.compile(r"(?<![\w./-])model\.(?=\w)")  # a setting, and no part of a path
_OPTION = re.compile(r"(?<![\w./-])model=")


@dataclass(frozen=True, kw_only=True)
class FrozenModel:
    """A model that a task asks and never trains, such as a teacher.

    Attributes:
        section: Its section of the config.
        make: Constructs it; called under the meta device.
        settings: Those of its settings that change what its weights compute.
        is_copy: Whether it is the trained model as it was before the first step.
    """

    section: str
    make: Callable[[], nn.Module]
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_copy: bool = False

    def on_meta(self) -> nn.Module:
        """Return it unsharded and without storage."""
        with torch.device("meta"), naming(self.section):
            return self.make()


@contextmanager
def naming(section: str) -> Iterator[None]:
    """Let errors about a model, whose code speaks of `model.…`, name its section of the config."""
    try:
        yield
    except ConfigError as error:
        setting, reason, fix = (
            _OPTION.sub(f"model@{section}=", _KEY.sub(f"{section}.", text))
            for text in (error.setting, error.reason, error.fix)
        )
        raise ConfigError(setting, reason, fix) from error


@dataclass(frozen=True)
class Base:
    """Identity of frozen weights.

    Attributes:
        name: Folder or hub name of the published model; else the seed they were drawn from.
        hash: Hash of the published tensors; None for weights from a seed.
        in_nf4: Whether they are held in 4 bits.
        weights: Which weights of a run's checkpoint, `name`; None: it is no run.
        settings: Settings of the model that they belong to; empty beside an adapter, whose model the checkpoint names.
        is_copy: Whether they are those that the run began with, of a frozen copy of its model.
    """

    name: str
    hash: str | None
    in_nf4: bool = False
    weights: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_copy: bool = False

    @property
    def is_published(self) -> bool:
        """Whether they were read from files."""
        return self.hash is not None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of them."""
        return asdict(self)


def check_base(own: Base | None, saved: Mapping[str, Any] | None) -> None:
    """Check that an adapter's base weights are those it was trained on, in whichever folder they are now.

    Args:
        own: Frozen weights of this run; None without an adapter.
        saved: Those of the checkpoint, as `Base.state` returned them.

    Raises:
        ConfigError: The base weights differ.
    """
    before = None if saved is None else Base(**saved)
    if own is None or before is None or own.is_published != before.is_published or own.in_nf4 != before.in_nf4:
        if own == before:
            return
        raise ConfigError(
            "resume=… model.… adapter.…",
            f"the checkpoint is of {_describe_base(before)}, and this run of {_describe_base(own)}",
            "resume=… without settings of the model, its weights, the adapter and the seed",
        )
    _check_weights(own, before, section="model", trained="the adapter was trained", whose="beside the adapter")


def check_frozen_model(section: str, own: Base, saved: Mapping[str, Any] | None) -> None:
    """Check that a frozen model is the one that a run was trained beside, in whichever folder it is now.

    Args:
        section: Its section of the config, such as `teacher`; of a copy, its name.
        own: The model of this run.
        saved: That of the checkpoint, as `Base.state` returned it; None: it was trained beside none, and goes on
            beside this one, unless that is a copy.

    Raises:
        ConfigError: The weights or the settings differ, or nothing says of which weights a copy is.
    """
    if saved is None:
        if own.is_copy:
            reason = "the run has none so far, and no checkpoint of it says with which weights it began"
            fix = "resume=… without it, or resume=null to begin with it"
            raise ConfigError("resume=… with a frozen copy of the first weights", reason, fix)
        return
    before = Base(**saved)
    changed = [key for key, value in before.settings.items() if own.settings.get(key) != value]
    section = "model" if own.is_copy else section
    if changed or own.is_published != before.is_published:
        named = [f"{section}.{key}={own.settings.get(key)}" for key in changed]
        was = [f"{section}.{key}={before.settings[key]}" for key in changed]
        raise ConfigError(
            f"resume=… with {' '.join(named) or _describe_weights(own)}",
            f"the run was trained beside {' '.join(was) or _describe_weights(before)}",
            f"resume=… without settings of {section}",
        )
    whose = "that the run began with" if own.is_copy else f"of the {section}"
    _check_weights(own, before, section=section, trained="the run was trained", whose=whose)


def _check_weights(own: Base, before: Base, *, section: str, trained: str, whose: str) -> None:
    """Reject published weights with other values, and weights from another seed."""
    if own.is_published and own.hash != before.hash:
        is_of_run = own.weights is not None
        raise ConfigError(
            f"resume=… with the weights of {own.name}",
            f"they have other values than when {trained} beside {before.name}",
            f"the same command with the weights as they were at {before.name}"
            if is_of_run
            else f"resume=… {section}.pretrained=<folder with the weights as they were>",
        )
    if not own.is_published and own.name != before.name:
        raise ConfigError(
            f"resume=… seed={own.name}",
            f"the weights {whose} were drawn from seed={before.name}",
            f"resume=… seed={before.name}",
        )


def _describe_base(base: Base | None) -> str:
    if base is None:
        return "a model without an adapter"
    return f"an adapter beside {_describe_weights(base)}{' in NF4' if base.in_nf4 else ''}"


def _describe_weights(base: Base) -> str:
    return f"the weights of {base.name}" if base.is_published else f"weights drawn from seed={base.name}"
