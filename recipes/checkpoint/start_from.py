"""First weights of a run from a checkpoint of another: matched by name and shape, read by every engine.

A source is a run of all weights; or of an adapter, which is either kept, beside the same frozen weights, or merged into
them. Frozen weights beside an adapter are in no checkpoint: they are read where that run had them from, which may be a
third run. Each rank reads one unsharded tensor at a time, or its own shard; no collectives but for verification.
"""

import copy
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeGuard, TypeVar

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipes.adapter import is_adapter
from recipes.checkpoint.layout import RUN_FILE, State, select_weights
from recipes.checkpoint.saved_tensor import SavedTensor
from recipes.errors import ConfigError
from recipes.foreign_file import reading
from recipes.model import as_model
from recipes.model.init import fill, fill_through, named_buffers, named_parameters, without_wrappers
from recipes.model.projection import init_projection, without_projection
from recipes.model.score import init_heads
from recipes.model.weights import load_published
from recipes.model.weights.adapter import has_adapter
from recipes.model.weights.files import hash_parts, list_places
from recipes.numerics.nf4 import is_nf4
from recipes.parallel.placement import find_box, local

_PREFIX = "model."  # of the names of a task's weights
_VOCABULARY = ("embedding.weight", "head.weight")  # with one row for each token, see `recipes.model.Model`
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_MOST_STARTS = 1_000  # of a chain of runs
Weights = Literal["trained", "ema"]
FIX = "start_from=<another checkpoint, or another run>"


class Open(Protocol):
    """Opens a checkpoint on every rank."""

    def __call__(self, path: Path, *, falls_back: bool) -> tuple[State, Path]:
        """Return the state with tensors on disk, and the checkpoint that it is of; both verified."""


@dataclass(frozen=True)
class Ranks:
    """What a source needs of the ranks.

    Attributes:
        is_first: Whether this is rank 0.
        broadcast: Returns the value of rank 0.
    """

    is_first: bool
    broadcast: Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class BaseRecord:
    """Frozen weights beside an adapter, as its checkpoints name them.

    Attributes:
        name: Folder or hub name of a published model, checkpoint of a run, or seed.
        hash: Hash of the tensors; None for weights from a seed.
        weights: Which weights of a run; None: it is no run.
    """

    name: str
    hash: str | None
    weights: Weights | None = None

    @classmethod
    def read(cls, state: State) -> "BaseRecord | None":
        """Return the record in a checkpoint; None of a run without an adapter."""
        saved = state["base"]
        if saved is None:
            return None
        return cls(name=str(saved["name"]), hash=saved["hash"], weights=saved.get("weights"))


class FrozenBase:
    """Frozen weights beside an adapter, wherever they come from.

    Args:
        record: What the checkpoint of the adapter says about them.
        setting: The override that named that checkpoint, for errors.
        open_checkpoint: Opens the checkpoint of a run.
        make_model: Returns the model without storage.
    """

    steps: tuple[dict[str, Any], ...] = ()

    def __init__(
        self, record: BaseRecord, *, setting: str, open_checkpoint: Open, make_model: Callable[[], nn.Module]
    ) -> None:
        self.record = record
        self._setting = setting
        self._run: SourceRun | None = None
        if record.weights is not None:
            self._run = SourceRun(
                Path(record.name),
                weights=record.weights,
                falls_back=False,
                open_checkpoint=open_checkpoint,
                make_model=make_model,
                make_adapted=None,
                model_settings={},  # those of the adapter's own checkpoint are compared
            )

    def __deepcopy__(self, memo: Any) -> "FrozenBase":
        return self

    def prepare(self, model: nn.Module, ranks: Ranks) -> None:
        """Verify the weights against the hash of the record.

        Raises:
            ConfigError: They are not there, or have other values.
        """
        record = self.record
        digest: str | None = None
        if self._run is not None:
            if not Path(record.name).is_dir():
                raise ConfigError(
                    self._setting,
                    f"its adapter was trained beside the weights of {record.name}, which is not there",
                    f"the same command with a copy of that checkpoint, or a link to one, at {record.name}",
                )
            self._run.prepare(model, ranks)
            digest = self._run.hash
        elif record.hash is not None:
            # a model that was put together knows its parts, of which the record has the hash alone
            places = (record.name,) if len(list_places(model)) < 2 else list_places(model)
            digest = ranks.broadcast(hash_parts(places) if ranks.is_first else None)
        if digest != record.hash:
            raise ConfigError(
                self._setting,
                f"the weights of {record.name} have other values than when its adapter was trained beside them",
                f"the same command with the weights as they were at {record.name}",
            )

    def load_base(self, model: nn.Module, seed: int) -> None:
        """Fill every parameter that is not the adapter's."""
        if self._run is not None:
            self._run.load_base(model, seed)
        elif self.record.hash is None:
            as_model(model).init_weights(int(self.record.name))
        else:
            load_published(model, self.record.name, seed=seed)

    def load_adapter(self, model: nn.Module) -> bool:
        """Return False: these are the weights beside an adapter."""
        return False

    def describe(self) -> Iterator[str]:
        """Yield nothing: the checkpoint of the run itself has what is trained."""
        yield from ()


class SourceRun:
    """A run whose weights another one starts from.

    Args:
        named: Its newest valid checkpoint, or the one that was named.
        weights: `trained`, or `ema` for their moving average.
        falls_back: Whether an older checkpoint is read if this one is damaged.
        open_checkpoint: Opens a checkpoint.
        make_model: Returns the model of the new run, without storage.
        make_adapted: Returns that model with the adapter of the source, to merge it; None: there is none to merge.
        model_settings: Settings of the new run's model that change what its weights compute.

    Attributes:
        hash: Hash of the weights that are read; after `prepare`.
        steps: This source and those that it started from itself, newest first; after `prepare`.
    """

    hash: str
    steps: tuple[dict[str, Any], ...]

    def __init__(
        self,
        named: Path,
        *,
        weights: Weights,
        falls_back: bool,
        open_checkpoint: Open,
        make_model: Callable[[], nn.Module],
        make_adapted: Callable[[], nn.Module] | None,
        model_settings: Mapping[str, Any],
    ) -> None:
        self._named = named
        self._weights: Weights = weights
        self._falls_back = falls_back
        self._open = open_checkpoint
        self._make_model = make_model
        self._make_adapted = make_adapted
        self._model_settings = model_settings
        self._saved: dict[str, SavedTensor] | None = None
        self._base: FrozenBase | None = None
        self._lines: list[str] = []
        self._grown: dict[str, int] = {}  # name -> rows that the source has

    def __deepcopy__(self, memo: Any) -> "SourceRun":
        return self

    @property
    def record(self) -> BaseRecord:
        """The weights beside an adapter of the new run."""
        if self._base is not None:
            return self._base.record
        return BaseRecord(name=str(self.steps[0]["path"]), hash=self.hash, weights=self._weights)

    def prepare(self, model: nn.Module, ranks: Ranks) -> None:
        """Open the checkpoint, and account for every tensor of it and of the model. Collective.

        Args:
            model: The whole model of the new run, without storage.
            ranks: The ranks.

        Raises:
            ConfigError: The checkpoint is damaged or of another model, or has no such weights.
        """
        if self._saved is not None:
            return
        state, path = self._open(self._named, falls_back=self._falls_back)
        with reading(path, self._setting, FIX):
            saved = _select(state, self._weights, setting=self._setting)
            record = BaseRecord.read(state)
            self._source_settings = state["model_settings"]
            num_rows = self._source_settings.get("vocab_size")
            step, before = int(state["global_step"]), _read_steps(state)
            self._check_settings(state, model)
        if record is not None:
            if self._make_adapted is None and not has_adapter(model):
                reason = "its weights are those of an adapter, and no config.yaml beside it says of which"
                raise ConfigError(self._setting, reason, f"start_from=<the run folder of {path.name}, complete>")
            if self._make_adapted is not None and state["base"]["in_nf4"]:
                raise ConfigError(
                    self._setting,
                    "its adapter was trained beside weights in NF4, and merging it would round or change these",
                    f"mode=export resume={self._named}, and then model.pretrained=<its export> instead of start_from",
                )
            make = self._make_adapted if self._make_adapted is not None else self._make_model
            self._base = FrozenBase(record, setting=self._setting, open_checkpoint=self._open, make_model=make)
            self._base.prepare(model, ranks)
        with reading(path, self._setting, FIX):
            self.hash = ranks.broadcast(_hash(saved) if ranks.is_first else None)
        self._saved = saved
        own = {"path": str(path.resolve()), "step": step, "weights": self._weights, "hash": self.hash}
        self.steps = (own, *before)
        self._lines = [f"started from {path} at step {step}, {self._weights} weights"]
        self._account(model, num_rows if isinstance(num_rows, int) else None)

    def _check_settings(self, state: State, model: nn.Module) -> None:
        """Check that the weights compute the same in this model: some settings change no shape. Tokens may be added."""
        published: Any = getattr(model, "published_config", dict)
        of_head = getattr(model, "new_head_with", ())
        pairs = [
            (f"model.{key}", value, self._model_settings)
            for key, value in state["model_settings"].items()
            if key not in of_head
        ]
        pairs += [(key, value, published()) for key, value in state["published_config"].items()]
        for name, value, own in pairs:
            now = own.get(name.removeprefix("model."), value)
            has_grown = name == "model.vocab_size" and isinstance(now, int) and isinstance(value, int) and now > value
            if json.dumps(now, sort_keys=True) != json.dumps(value, sort_keys=True) and not has_grown:
                raise ConfigError(
                    f"{self._setting} with {name}={now}",
                    f"its weights were trained with {name}={value}",
                    f"{name}={value}, or start_from=null to train another model",
                )

    @property
    def _setting(self) -> str:
        return f"start_from={self._named}"

    def describe(self) -> Iterator[str]:
        """Yield what was read, where each tensor of the source went, and where each of the model came from."""
        yield from self._lines

    # What goes where.

    def _account(self, model: nn.Module, num_rows: int | None) -> None:
        """Match the tensors of the source and of the model by name.

        Args:
            model: The whole model of the new run.
            num_rows: Tokens of the source's vocabulary; None: it has none.
        """
        assert self._saved is not None, "it has been opened"
        own = list_shapes(model)
        saved = {name: torch.Size(tensor.shape) for name, tensor in self._saved.items()}
        if self._base is not None:
            self._account_for_adapter(own, saved)
            return
        own_rows: int | None = getattr(model, "vocab_size", None)
        for name in self._find_other_head(own, saved, model):
            del saved[name], self._saved[name]
        for name in own.keys() & saved.keys():
            kept_rows = num_rows if num_rows is not None and own_rows is not None and own_rows >= num_rows else None
            if name in _VOCABULARY and kept_rows is not None and saved[name][1:] == own[name][1:]:
                if own_rows != kept_rows or saved[name] != own[name]:  # more tokens, or other padding
                    self._grown[name] = kept_rows
            elif own[name] != saved[name]:
                raise ConfigError(
                    self._setting,
                    f"{name} is {[*saved[name]]} there and {[*own[name]]} here",
                    "the same command with the model.… of that run, or start_from=null to train another model",
                )
        loaded = [name for name in own if name in saved]
        if not any(name in saved for name in own):
            raise ConfigError(self._setting, "no tensor of it has a name that this model knows", FIX)
        new = [name for name in own if name not in saved]
        self._count("loaded", loaded, own)
        self._count("new", new, own)
        self._count("left out", [name for name in saved if name not in own], saved)
        if self._grown and own_rows is not None and num_rows is not None and own_rows > num_rows:
            names = " and ".join(sorted(self._grown))
            self._lines.append(
                f"  vocabulary: {own_rows - num_rows} new tokens, rows {num_rows} to {own_rows} of {names}"
            )

    def _find_other_head(
        self, own: Mapping[str, torch.Size], saved: Mapping[str, torch.Size], model: nn.Module
    ) -> list[str]:
        """Return the tensors whose rows are outputs of a head that has another number of them in this model."""
        changed = {
            (self._source_settings[key], self._model_settings[key]): key
            for key in getattr(model, "new_head_with", ())
            if self._source_settings.get(key, self._model_settings.get(key)) != self._model_settings.get(key)
        }
        found = []
        for name in own.keys() & saved.keys():
            (there, *of_there), (here, *of_here) = (*saved[name], 0), (*own[name], 0)
            if there != here and of_there == of_here and (there, here) in changed:
                found.append(name)
        if found:
            [(there, here)] = changed
            self._lines.append(f"  head of {there} outputs there and {here} here, which begins anew")
        return found

    def _account_for_adapter(self, own: Mapping[str, torch.Size], saved: Mapping[str, torch.Size]) -> None:
        assert self._base is not None, "it is the checkpoint of an adapter"
        base = self._base.record
        where = f"drawn from seed {base.name}" if base.hash is None else f"from {base.name}"
        frozen = [name for name in own if not is_adapter(name) and name not in saved]
        self._count(f"beside its adapter, {where}", frozen, own)
        if self._make_adapted is not None:
            expected = list_shapes(self._make_adapted())
            adapter = [name for name in saved if is_adapter(name)]
            self._check_adapter({name: expected[name] for name in expected if is_adapter(name)}, saved)
            self._count("merged into them", adapter, saved)
        else:
            adapter = [name for name in own if is_adapter(name)]
            self._check_adapter({name: own[name] for name in adapter}, saved)
            self._count("loaded", adapter, own)
        self._count("loaded", [name for name in own if name in saved and not is_adapter(name)], own)
        self._count("left out", [name for name in saved if not is_adapter(name) and name not in own], saved)

    def _check_adapter(self, own: Mapping[str, torch.Size], saved: Mapping[str, torch.Size]) -> None:
        for name in [*own, *(name for name in saved if is_adapter(name))]:
            if own.get(name) != saved.get(name):
                here, there = (
                    str([*found]) if found is not None else "missing" for found in (own.get(name), saved.get(name))
                )
                raise ConfigError(
                    self._setting,
                    f"{name} is {there} there and {here} here",
                    "the same command with the adapter.… of that run, or adapter=none, which merges it",
                )

    def _count(self, what: str, names: list[str], shapes: Mapping[str, torch.Size]) -> None:
        if names:
            elements = sum(shapes[name].numel() for name in names)
            tensors = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
            self._lines.append(f"  {what}: {tensors}, {elements:,} values: {', '.join(_condense(names))}")

    # The weights themselves.

    def load_base(self, model: nn.Module, seed: int) -> None:
        """Fill every parameter that is not the adapter's, and the buffers of the checkpoint.

        Args:
            model: The model with storage, or a part of it; sharded or not.
            seed: Seed of the new run, from which new tensors are drawn.
        """
        assert self._saved is not None, "it has been prepared"
        if self._base is None:
            as_model(model).init_buffers()
            with reading(self._named, self._setting, FIX):
                self._fill(model, seed)
        elif self._make_adapted is None:
            self._base.load_base(model, seed)
        else:
            as_model(model).init_buffers()
            self._merge(model, seed)
        persistent = {without_wrappers(name) for name in model.state_dict()}
        with reading(self._named, self._setting, FIX):
            for name, buffer in named_buffers(model):
                if name in persistent and name in self._saved:
                    buffer.copy_(self._saved[name].read())
            for name, parameter in named_parameters(model):
                if self._base is not None and name in self._saved:  # trained beside the adapter, such as a score
                    fill(parameter, self._saved[name].read())

    def _fill(self, model: nn.Module, seed: int) -> None:
        assert self._saved is not None, "it has been prepared"
        drawn = self._draw({name for name, _ in named_parameters(model)}, seed)
        for name, parameter in named_parameters(model):
            saved = self._saved.get(name)
            if saved is None:
                fill(parameter, drawn[name])
            elif name in self._grown:
                rows = self._grown[name]
                values = drawn[name].clone()
                values[:rows] = saved.read_box((0,) * len(saved.shape), (rows, *saved.shape[1:]))
                fill(parameter, values)
            elif _reads_own_shard(parameter):
                shard = local(parameter)
                shard.copy_(saved.read_box(*find_box(parameter)).view(shard.shape))
            else:
                fill(parameter, saved.read())

    def _draw(self, names: Iterable[str], seed: int) -> dict[str, Tensor]:
        """Return the initial values of those parameters that the source does not have, or not all rows of."""
        assert self._saved is not None, "it has been prepared"
        new = {name for name in names if name not in self._saved or name in self._grown}
        if not new:
            return {}
        whole = self._make_model()
        drawn: dict[str, Tensor] = {}

        def keep(name: str, values: Tensor) -> None:
            if name in new:
                drawn[name] = values

        for name, parameter in named_parameters(whole):
            fill_through(parameter, functools.partial(keep, name))
        init_heads(whole, seed=seed)
        init_projection(whole, seed=seed)
        with without_projection(whole):
            as_model(whole).init_weights(seed)
        return drawn

    def _merge(self, model: nn.Module, seed: int) -> None:
        """Fill the model with the frozen weights and the adapter merged into them, one layer in memory at a time."""
        assert self._saved is not None, "it has been prepared"
        assert self._base is not None, "it is the checkpoint of an adapter"
        assert self._make_adapted is not None, "it has an adapter to merge"
        adapted = self._make_adapted()
        layers = {
            without_wrappers(name): layer for name, layer in adapted.named_modules() if hasattr(layer, "base_layer")
        }
        targets = dict(named_parameters(model))
        read: dict[str, dict[str, Tensor]] = {name: {} for name in layers}

        def take(name: str, values: Tensor) -> None:
            layer, _, own = name.rpartition(".")
            if layer not in layers:
                put(name, values)
                return
            read[layer][own] = values.clone()
            if len(read[layer]) == len(list(layers[layer].base_layer.parameters())):
                for merged, whole in self._merge_layer(layer, layers[layer], read.pop(layer)).items():
                    put(f"{layer}.{merged}", whole)

        def put(name: str, values: Tensor) -> None:
            if name in targets:  # else it belongs to another stage
                fill(targets[name], values)

        for name, parameter in named_parameters(adapted):
            fill_through(parameter, functools.partial(take, name))
        self._base.load_base(adapted, seed)

    def _merge_layer(self, name: str, layer: nn.Module, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of a layer with its adapter merged, by peft itself, as an export has them."""
        assert self._saved is not None, "it has been prepared"
        whole: Any = copy.deepcopy(layer).to_empty(device="cpu")
        for key, parameter in whole.named_parameters():
            if is_adapter(f"{name}.{key}"):
                with reading(self._named, self._setting, FIX):
                    parameter.copy_(self._saved[f"{name}.{key}"].read())
            else:
                parameter.copy_(base[key.removeprefix("base_layer.")])
        whole.merge(safe_merge=True)
        return dict(whole.base_layer.named_parameters())

    def load_adapter(self, model: nn.Module) -> bool:
        """Fill the adapter of a model from the source; return whether that has one."""
        assert self._saved is not None, "it has been prepared"
        if self._base is None:
            return False
        for name, parameter in list(model.named_parameters()):
            if is_adapter(name):
                with reading(self._named, self._setting, FIX):
                    fill(parameter, self._saved[without_wrappers(name)].read())
        return True


def list_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the unsharded shapes of what a checkpoint of a model may hold, by names as without wrappers.

    Tied parameters and buffers that are constant are left out.
    """
    names = {without_wrappers(name) for name in model.state_dict()}
    shapes = {name: parameter.shape for name, parameter in named_parameters(model)}
    shapes |= {name: buffer.shape for name, buffer in named_buffers(model) if name in names}
    if has_adapter(model):
        shapes |= {without_wrappers(name): each.shape for name, each in model.named_parameters() if is_adapter(name)}
    return shapes


def _select(state: State, weights: Weights, *, setting: str) -> dict[str, SavedTensor]:
    """Return the tensors of the model by name, additional names of tied ones left out."""
    tied = state["tied"]
    found = select_weights(
        state, weights, setting=f"{setting} start_from_weights=ema", fix="start_from_weights=trained"
    )
    return {
        without_wrappers(name.removeprefix(_PREFIX)): tensor
        for name, tensor in found.items()
        if name.startswith(_PREFIX) and name not in tied
    }


def _hash(saved: Mapping[str, SavedTensor]) -> str:
    """Return a hash of all tensors by name, however they were sharded; reads them once."""
    digest = xxhash.xxh3_128()
    for name in sorted(saved):
        values = saved[name].read()
        digest.update(f"{name} {values.dtype} {[*values.shape]}\n".encode())
        digest.update(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read_steps(state: State) -> tuple[dict[str, Any], ...]:
    """Return the runs that a checkpoint's own run started from, newest first."""
    steps = state.get("started_from", [])
    if len(steps) > _MOST_STARTS:
        raise ValueError(f"it was started from {len(steps)} runs")
    return tuple(
        {
            "path": str(each["path"]),
            "step": int(each["step"]),
            "weights": str(each["weights"]),
            "hash": str(each["hash"]),
        }
        for each in steps
    )


def _condense(names: Iterable[str]) -> list[str]:
    """Return names with `*` for the numbers of blocks and experts, each with how many it stands for."""
    counts: dict[str, int] = {}
    for name in names:
        pattern = _NUMBER.sub("*", name)
        counts[pattern] = counts.get(pattern, 0) + 1
    return [f"{pattern} ({count})" if count > 1 else pattern for pattern, count in counts.items()]


def _reads_own_shard(parameter: Tensor) -> TypeGuard[DTensor]:
    is_filled = hasattr(parameter, "fill_whole") or hasattr(parameter, "row_order") or is_nf4(parameter)
    return isinstance(parameter, DTensor) and not is_filled


def read_base(checkpoints: Iterable[Path]) -> BaseRecord | None:
    """Return the weights beside the adapter of a run that started from another one; None of any other run.

    Args:
        checkpoints: Checkpoints of the run: the first that can be read counts, as all say the same.
    """
    return _read_first(checkpoints, lambda state: BaseRecord.read(state) if state.get("started_from") else None)


def read_start(checkpoints: Iterable[Path]) -> tuple[Path, Weights] | None:
    """Return the checkpoint that a run started from, and which weights of it; None: it started from none.

    Args:
        checkpoints: Checkpoints of the run: the first that can be read counts, as all say the same.
    """

    def read(state: State) -> tuple[Path, Weights] | None:
        steps = _read_steps(state)
        return (Path(steps[0]["path"]), "ema" if steps[0]["weights"] == "ema" else "trained") if steps else None

    return _read_first(checkpoints, read)


_Read = TypeVar("_Read")


def _read_first(checkpoints: Iterable[Path], read: Callable[[State], _Read | None]) -> _Read | None:
    for folder in checkpoints:
        try:
            return read(torch.load(folder / RUN_FILE, map_location="cpu", weights_only=True))
        except Exception:  # a damaged one is rejected, with the reason, when it is loaded
            continue
    return None
