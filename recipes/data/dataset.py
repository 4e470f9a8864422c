"""Samples of one's own torch Dataset: pairs or dicts by index, whose order, ranks and resume are those of every source.

What a sample draws from the global generators of Python, numpy and torch depends on (seed, position) alone: they are
seeded before it is read, and are afterwards as they were before.

Shapes: V targets per sample.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from numpy.random import MT19937, Generator
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from recipes.data.draws import has_draws, rng_at
from recipes.errors import ConfigError, type_setting
from recipes.tokenizer import Tokenizer

_NUM_PLACES = 5  # of NaN or inf that an error names
_NUM_PROBED = 8  # samples that are read to find what they are: of each split, spread evenly
# of a batch, whose values come from the stream
_TAKEN: tuple[str, ...] = (
    "num_samples",
    "num_tokens",
    "num_token_pairs",
    "num_read_images",
    "num_targets",
    "source",
    "positions",
)
_TAKEN += ("num_inputs",)
_OF_TOKENS = ("positions", "num_inputs")  # those that samples of tokens may have
# methods of a dataset that the stream calls if it has them, see `SampleDataset`
_OPTIONAL = ("count_inputs", "count_images", "make_order")
_UINT32 = np.uint64((1 << 32) - 1)
_NUMPY = MT19937(0)  # that of numpy while a sample is read

Kind = Literal["tensors", "images", "tokens"]
TargetKind = Literal["classes", "labels", "probabilities", "values"]


class Deferred(Protocol):
    """What a section with a `_target_` becomes where it is built later."""

    def __call__(self) -> Any: ...


class OwnDataset:
    """A training and a validation set, each a map-style torch Dataset of pairs or dicts.

    Args:
        train: Makes the training set; called in `prepare`, so that a mode that reads no data needs none.
        val: Makes the validation set.
        test: Makes that of `mode=test`; None: there is none.
        predict: Makes that of `mode=predict`, whose samples need no targets; None: there is none.
        kind: What the inputs are: `tensors` of any shape, `images` [C, H, W] float, or `tokens` [T] with targets [T].
        target_kind: What the targets are: `classes`, whole numbers; or, per sample, V `labels` from 0 to 1, V
            `probabilities`, or one or V `values`.
        inputs: Key of the inputs in samples that are dicts.
        targets: Key of the targets.
        draws: Whether samples may draw from the generators of Python, numpy or torch, which are then seeded for each.
        collate: Makes a batch, a dict of tensors, of a list of samples, dicts; None: they are stacked.
    """

    sample_kind: ClassVar[str] = "{kind}"
    target_kind: ClassVar[str] = "{target_kind}"
    deferred: ClassVar[tuple[str, ...]] = ("train", "val", "test", "predict")
    tokenizer: ClassVar[Tokenizer | None] = None  # of samples that are tokens already, it is unknown

    def __init__(
        self,
        *,
        train: Deferred,
        val: Deferred,
        test: Deferred | None,
        predict: Deferred | None,
        kind: Kind,
        target_kind: TargetKind,
        inputs: str,
        targets: str,
        draws: bool,
        collate: Callable[..., Any] | None,
    ) -> None:
        self.sample_kind = kind  # type: ignore[misc]  # the class says which setting it is, for the config check
        made = {"train": train, "val": val, "test": test, "predict": predict}
        self._make = {split: make for split, make in made.items() if make is not None}
        self._reader = _Reader(kind=kind, target_kind=target_kind, inputs=inputs, targets=targets)
        self._draws = draws
        self._samples: dict[str, Samples] = {}
        if collate is not None:
            self.collate = collate

    def prepare(self) -> None:
        """Make all datasets but that of new samples, and read a few of each; a second call does nothing.

        Raises:
            ConfigError: A dataset cannot be read by index, or its samples are neither pairs nor dicts of tensors, or
                have inputs of NaN or inf.
        """
        self._prepare([split for split in self._make if split != "predict"])

    @property
    def has_new_samples(self) -> bool:
        """Whether there is a dataset of new samples."""
        return "predict" in self._make

    def prepare_split(self, split: str) -> None:
        """Make the dataset of one split, if there is one, and no other."""
        self._prepare([split] if split in self._make else [])

    def _prepare(self, splits: Sequence[str]) -> None:
        made = {}
        for split in splits:
            if split in self._samples:
                continue
            dataset = self._make[split]()
            _check_members(f"data.{split}", dataset)
            reader = replace(self._reader, needs_targets=split != "predict")
            made[split] = Samples(dataset, reader, setting=_describe(split, dataset), draws=self._draws)
            if not hasattr(self, "collate"):
                made[split].check_shapes()
                made[split].check_finite()
        self._samples |= made

    @property
    def fingerprint(self) -> str:
        """The number of training samples, and a hash of some of them; of the split that alone is prepared."""
        return next(iter(self._samples.values())).fingerprint

    @property
    def val_fingerprint(self) -> str:
        """The number of validation samples, and a hash of some of them."""
        return self._samples["val"].fingerprint

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes, in `classes` of the training set as in torchvision's; None: it has none.

        Those of the split that alone is prepared.
        """
        first = next(iter(self._samples.values()), None)
        names: Any = None if first is None else first.get_property("classes")
        is_named = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
        return [*names] if is_named else None

    @property
    def transform(self) -> str | None:
        """What the validation set does to an input, as its `transform` prints itself; None: it has none."""
        transform = self._samples["val"].get_property("transform")
        return None if transform is None else repr(transform)

    def describe(self) -> str:
        """Return the number of samples and what one of them is."""
        train, val = self._samples["train"], self._samples["val"]
        return f"{len(train):,} training and {len(val):,} validation samples of {train.describe()}"

    def train(self) -> "Samples":
        """Return the training samples."""
        return self._samples["train"]

    def val(self) -> "Samples":
        """Return the validation samples."""
        return self._samples["val"]

    def test(self) -> "Samples | None":
        """Return the test samples; None: there are none."""
        return self._samples.get("test")

    def predict(self) -> "Samples | None":
        """Return the new samples, which may have no targets; None: there are none."""
        return self._samples.get("predict")


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """What the samples of a dataset are, and how one becomes `inputs` and `targets`.

    Args:
        needs_targets: Whether a sample must have targets.

    Other arguments: see `OwnDataset`.
    """

    kind: Kind
    target_kind: TargetKind
    inputs: str
    targets: str
    needs_targets: bool = True

    @property
    def _names(self) -> dict[str, str]:
        return {"inputs": self.inputs, "targets": self.targets}

    def read(self, sample: Any, setting: str) -> dict[str, Tensor]:
        """Return `inputs`, `targets` and whatever else of a dict is a number or a tensor.

        Raises:
            ConfigError: The sample is neither a pair nor a dict, or one of both is missing or no tensor.
        """
        if isinstance(sample, Mapping):
            parts = self._name_parts(sample, setting)
        elif not self.needs_targets and isinstance(sample, Tensor | np.ndarray):
            parts = {"inputs": sample}
        elif isinstance(sample, Sequence) and not isinstance(sample, str) and len(sample) == 2:
            parts = dict(zip(("inputs", "targets"), sample, strict=True))
        else:
            reason = f"a sample of it is {_name_type(sample)}, and neither a pair (inputs, targets) nor a dict"
            raise ConfigError(setting, reason, 'return x, y, or return {"inputs": x, "targets": y}, in its __getitem__')
        read: dict[str, Tensor] = {}
        for name, value in parts.items():
            if name == "targets" and value is None and not self.needs_targets:
                continue
            tensor = _to_tensor(value)
            if tensor is not None:
                read[name] = tensor
            elif name in self._names:
                reason = f"the {name} of a sample are {_name_type(value)}, not a tensor, an array or a number"
                raise ConfigError(setting, reason, "return torch.as_tensor(…) in its __getitem__, for example")
        return self._check_kind(read, setting)

    def _name_parts(self, sample: Mapping[str, Any], setting: str) -> dict[str, Any]:
        """Return the values of a dict, the inputs and targets under these names."""
        needed = self._names if self.needs_targets else {"inputs": self.inputs}
        missing = [name for name, key in needed.items() if key not in sample]
        if missing:
            known = ", ".join(map(str, sample)) or "nothing"
            asked = " and no ".join(repr(self._names[name]) for name in missing)
            reason = f"a sample of it is a dict of {known}, and has no {asked}"
            raise ConfigError(setting, reason, " ".join(f"data.{name}=<one of them>" for name in missing))
        rest = {str(key): value for key, value in sample.items() if key not in self._names.values()}
        own = [name for name in _TAKEN if name in rest and not (self.kind == "tokens" and name in _OF_TOKENS)]
        if own or {"inputs", "targets"} & rest.keys():
            clash = own[0] if own else next(name for name in self._names if name in rest)
            reason = f"a sample of it has {clash!r}, which is a name of the batch's own"
            raise ConfigError(setting, reason, f"another name for {clash!r} in the dict that its __getitem__ returns")
        return rest | {name: sample[key] for name, key in self._names.items() if key in sample}

    def _check_kind(self, sample: dict[str, Tensor], setting: str) -> dict[str, Tensor]:
        """Return a sample with targets of the dtype that losses read.

        Raises:
            ConfigError: Inputs or targets are not what `data.kind` and `data.target_kind` say.
        """
        inputs, targets = sample["inputs"], sample.get("targets")
        shown = f"{_show(inputs)} inputs and {'no' if targets is None else _show(targets)} targets"
        if self.kind == "images" and not (inputs.ndim == 3 and inputs.is_floating_point()):
            reason = f"a sample has {shown}, and images are floating-point numbers [C, H, W]"
            raise ConfigError(f"data.kind={self.kind} {setting}", reason, "data.kind=tensors, or such images")
        shape = None if targets is None else targets.shape
        if self.kind == "tokens" and (inputs.ndim != 1 or inputs.is_floating_point() or shape != inputs.shape):
            reason = f"a sample has {shown}, and tokens are whole numbers [T] with targets [T]"
            raise ConfigError(f"data.kind={self.kind} {setting}", reason, "data.kind=tensors, or such tokens")
        if targets is None:
            return sample
        is_whole = not targets.is_floating_point()
        if self.target_kind == "classes":
            if not is_whole:
                reason = f"a sample has {shown}, and classes are whole numbers"
                fix = "data.target_kind=values task=regression, or whole numbers as targets"
                raise ConfigError(f"data.target_kind=classes {setting}", reason, fix)
            return sample | {"targets": targets.long()}
        # as whole numbers, a target of -100 would have no loss
        return sample | {"targets": targets.to(torch.get_default_dtype())}


class Samples(Dataset[dict[str, Tensor]]):
    """Samples of a dataset as dicts of `inputs` and `targets`, equal in every process.

    Args:
        dataset: Map-style, of pairs or dicts; it may be random by itself, see `RandomSampleDataset`.
        reader: What its samples are.
        setting: What its errors name.
        draws: Whether its samples may draw from the global generators.
    """

    always_draws = False

    def __init__(self, dataset: Any, reader: _Reader, *, setting: str, draws: bool) -> None:
        self._dataset = dataset
        self._reader = reader
        self._setting = setting
        self._seeds = draws and not has_draws(dataset)
        if has_draws(dataset):
            self.always_draws = True
        elif not draws:
            self.sample = None  # type: ignore[assignment, method-assign]  # read by index
        for name in _OPTIONAL:
            if hasattr(dataset, name):
                setattr(self, name, getattr(dataset, name))
        # None: -100 or NaN may be among them, and they are counted in every batch
        self.targets_per_sample: int | None = getattr(dataset, "targets_per_sample", None)
        self.tokens_per_sample: int = getattr(dataset, "tokens_per_sample", 0)
        if reader.kind == "tokens" and not self.tokens_per_sample:
            self.tokens_per_sample = max(len(sample["inputs"]) for sample in self._probed)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a sample of a validation or a plan, which is the same at every reading."""
        if not self._seeds:
            return self._read(self._dataset[index])
        with seeded_generators(rng_at(0, index)):
            return self._read(self._dataset[index])

    def sample(self, index: int, rng: Generator) -> dict[str, Tensor]:
        """Return a sample of training, as it is drawn at a position of the stream."""
        if not self._seeds:
            return self._read(self._dataset.sample(index, rng))
        with seeded_generators(rng):
            return self._read(self._dataset[index])

    def get_property(self, name: str) -> Any:
        """Return an attribute that a dataset may have, None if it has not."""
        return getattr(self._dataset, name, None)

    def padding(self) -> dict[str, Tensor]:
        """Return a sample without a loss."""
        if hasattr(self._dataset, "padding"):
            return self._read(self._dataset.padding())
        sample = self[0]
        if "targets" not in sample:
            return sample
        ignored = torch.nan if sample["targets"].is_floating_point() else -100
        empty = {"num_inputs": torch.zeros_like(sample["num_inputs"])} if "num_inputs" in sample else {}
        return sample | {"targets": torch.full_like(sample["targets"], ignored)} | empty

    def _read(self, sample: Any) -> dict[str, Tensor]:
        return self._reader.read(sample, self._setting)

    @cached_property
    def _probed(self) -> list[dict[str, Tensor]]:
        number = min(_NUM_PROBED, len(self))
        return [self[place * len(self) // number] for place in range(number)]

    def check_shapes(self) -> None:
        """Check that samples can be stacked.

        Raises:
            ConfigError: Some of those that are read have other shapes.
        """
        for name in ("inputs", "targets"):
            shapes = sorted({tuple(sample[name].shape) for sample in self._probed if name in sample})
            if len(shapes) > 1:
                reason = f"the {name} of its samples have different shapes, {[*shapes[0]]} and {[*shapes[-1]]}"
                fix = "'data.collate={_target_: <module.function>, _partial_: true}', which pads a list of samples"
                raise ConfigError(self._setting, reason, fix)

    def check_finite(self) -> None:
        """Check that the inputs are numbers: one NaN makes the loss of its whole batch NaN.

        Raises:
            ConfigError: Some inputs of those samples that are read are NaN or inf.
        """
        floats = [sample["inputs"] for sample in self._probed if sample["inputs"].is_floating_point()]
        at_least_1d = [inputs.reshape(inputs.shape or (1,)) for inputs in floats]
        wrong = [place for inputs in at_least_1d if len(place := (~inputs.isfinite()).nonzero())]  # each [number, axes]
        if not wrong:
            return
        places = torch.cat(wrong).unique(dim=0).tolist()  # at most those of the samples tried
        shown = ", ".join(str(place[0] if len(place) == 1 else place) for place in places[:_NUM_PLACES])
        more = ", …" if len(places) > _NUM_PLACES else ""
        tried = f"{len(wrong)} of the {len(self._probed)} samples tried"
        reason = f"the inputs of {tried} hold NaN or inf, at index {shown}{more}, and with them the loss is NaN"
        fix = "torch.nan_to_num(…), a mean, or no such rows in its __getitem__; or data.collate=, which sees each batch"
        raise ConfigError(self._setting, reason, fix)

    @cached_property
    def fingerprint(self) -> str:
        """The number of samples, and a hash of some of them."""
        found = hashlib.blake2b(digest_size=8)
        for sample in self._probed:
            for name in sorted(sample):
                value = sample[name].contiguous().reshape(-1).view(torch.uint8)
                found.update(f"{name}{_show(sample[name])}".encode() + value.cpu().numpy().tobytes())
        return f"dataset/{len(self)}/{found.hexdigest()}"

    def describe(self) -> str:
        """Return what a sample has."""
        sample = self._probed[0]
        return f"{type(self._dataset).__name__}: " + ", ".join(f"{name} {_show(sample[name])}" for name in sample)


@contextmanager
def seeded_generators(rng: Generator) -> Iterator[None]:
    """Seed the global generators of Python, numpy and torch, the latter on the host, with numbers of a generator.

    They are afterwards as they were, so the dropout of a rank without loader processes does not depend on its samples.
    numpy's and torch's read 32 bits of a seed: two of 65,536 samples probably draw the same from one of them.
    """
    # as they are: `integers` takes 20 us more beside the decoding of an image, which empties the caches
    of_python, of_numpy, _ = seeds = (rng.bit_generator.random_raw(3) & _UINT32).tolist()
    numpys: Any = np.random  # whose stubs (2.4) leave out these two functions
    states = random.getstate(), numpys.get_bit_generator()
    # replaced, not read: the state of numpy's generator takes 100 us to copy
    numpys.set_bit_generator(_NUMPY)
    random.seed(of_python)
    np.random.seed(of_numpy)
    try:
        with _seeded_torch(seeds):
            yield
    finally:
        random.setstate(states[0])
        numpys.set_bit_generator(states[1])


@contextmanager
def seeded_torch(rng: Generator) -> Iterator[None]:
    """Seed torch's global generator on the host alone, as `seeded_generators` does: the others take 0.2 ms a sample."""
    with _seeded_torch((rng.bit_generator.random_raw(3) & _UINT32).tolist()):
        yield


@contextmanager
def _seeded_torch(seeds: Sequence[int]) -> Iterator[None]:
    host = torch.default_generator  # `torch.manual_seed` would also seed those of the devices
    state = host.get_state()
    host.manual_seed(seeds[-1])
    try:
        yield
    finally:
        host.set_state(state)


def _check_members(section: str, dataset: Any) -> None:
    """Check that a dataset can be read by index.

    Raises:
        ConfigError: It is a stream, or has no length or no samples.
    """
    setting = f"{section}._target_={_get_path(dataset)}"
    if isinstance(dataset, IterableDataset):
        reason = "it is an IterableDataset, which has no sample at an index: a resume could not find its place in it"
        fix = f"{type_setting(section, {'_target_': '<a torch Dataset with __len__ and __getitem__>'})}"
        raise ConfigError(setting, reason, fix)
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(type(dataset), name)]
    if missing:
        needed = {"__len__": "def __len__(self)", "__getitem__": "def __getitem__(self, index)"}
        reason = f"it has no {' and no '.join(missing)}, by which samples are found"
        raise ConfigError(setting, reason, f"{' and '.join(needed[name] for name in missing)} in that class")
    if len(dataset) == 0:
        raise ConfigError(setting, "it has no samples", f"{section}.<setting>=<value>, so that it finds some")


def _describe(split: str, dataset: Any) -> str:
    return f"data.{split}._target_={_get_path(dataset)}"


def _get_path(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _to_tensor(value: Any) -> Tensor | None:
    """Return a tensor of a number, an array or a list of numbers, of 32 bits instead of 64; None of anything else."""
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        # without a copy, but a writable one: a read-only array is that of a memory map
        value = torch.from_numpy(np.require(array, requirements=("C", "W"))) if array.dtype.kind in "biuf" else None
    elif not isinstance(value, Tensor):
        try:
            value = torch.tensor(value)
        except (TypeError, ValueError, RuntimeError):  # a text, an image object, None, a ragged list
            return None
    tensor: Tensor | None = value
    return tensor.to(torch.get_default_dtype()) if tensor is not None and tensor.dtype == torch.float64 else tensor


def _name_type(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"of type {_get_path(value)}"


def _show(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} [{', '.join(map(str, value.shape))}]"
