"""What sources of images share: splits of encoded images with their targets, read by index and drawn by position.

A source lists its images once, into a store that returns the bytes of each; from then on a folder, a table and shards
are the same.

Shapes: N images of a split, C channels, S x S pixels of a sample, V labels or values.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from recipes.data.dataset import seeded_generators, seeded_torch
from recipes.data.draws import rng_at
from recipes.data.image_file import BadImageError, decode, import_pillow
from recipes.errors import ConfigError
from recipes.files import count
from recipes.tokenizer import Tokenizer
from recipes.transform.images import ImageTransform

LOGGER = logging.getLogger("lightning_recipes")
_MAX_TRIES = 100  # images that cannot be decoded, one after the other
_NUM_NAMED = 3  # bad images, and classes, that are named
_SPLIT_NAMES = {"train": "training", "val": "validation", "test": "test"}
OnBadImage = Literal["error", "skip"]


class ImageStore(Protocol):
    """Encoded images by number; picklable, so that loader processes can be started anew."""

    def __len__(self) -> int: ...
    def read(self, number: int) -> bytes:
        """Return an encoded image.

        Raises:
            BadImageError: It can be no image.
            ConfigError: It cannot be read.
        """

    def name(self, number: int) -> str:
        """Return where it is, for errors and the log."""


class Columns(Protocol):
    """Columns of a table, or fields of the samples in shards, with what is learned of an image.

    Attributes:
        kind: What they hold; `pick` accepts equal cells for equal kinds.
        setting: Config key that names them, for errors.
    """

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def kind(self) -> str: ...
    @property
    def setting(self) -> str: ...
    def pick(self, fields: dict[str, Any], place: str) -> list[Any]:
        """Return the cells of a row.

        Raises:
            ConfigError: One is missing, or not of the kind.
        """


class Names(Sequence[str]):
    """Texts as one block of memory: a list of a million would be copied by every loader process that reads it."""

    def __init__(self, names: Iterable[str]) -> None:
        encoded = [name.encode("utf-8", "surrogateescape") for name in names]
        self._ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)  # [N]
        self._bytes = np.frombuffer(b"".join(encoded), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:  # type: ignore[override]  # no slices
        if not 0 <= index < len(self):
            raise IndexError(index)
        begin = 0 if index == 0 else self._ends[index - 1]
        return self._bytes[begin : self._ends[index]].tobytes().decode("utf-8", "surrogateescape")


@dataclass(frozen=True, kw_only=True)
class ListedImages:
    """Images of a table or of shards, in order, with the cells of each.

    Attributes:
        store: Encoded images.
        keys: What identifies each image in the store, see `ImageSplit`.
        images: Equal where two of them are the same image: a path, or a hash of its bytes.
        places: Where each is, for errors.
        cells: What `Columns.pick` returned for each.
    """

    store: ImageStore
    keys: Sequence[str]
    images: Sequence[str]
    places: Sequence[str]
    cells: Sequence[Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class ImageSplit:
    """Images of a split and their targets.

    Attributes:
        store: Encoded images.
        keys: What identifies each image in the store, such as its path; the split by a hash and the fingerprint read
            them.
        numbers: [N] int64, of the images of this split in the store.
        targets: [N] int64, of classes; or [N, V] float, of labels or values.
        class_names: Of classes and labels; None: the targets are values.
    """

    store: ImageStore
    keys: Sequence[str]
    numbers: NDArray[np.int64]
    targets: Tensor
    class_names: list[str] | None

    @classmethod
    def whole(
        cls, store: ImageStore, targets: Tensor, class_names: list[str] | None, keys: Sequence[str] | None = None
    ) -> Self:
        """Return all images of a store."""
        keys = Names(store.name(number) for number in range(len(store))) if keys is None else keys
        numbers = np.arange(len(store), dtype=np.int64)
        return cls(store=store, keys=keys, numbers=numbers, targets=targets, class_names=class_names)

    def __len__(self) -> int:
        return len(self.numbers)

    def divide(self, fraction: float) -> tuple[Self, Self]:
        """Divide by a hash of the keys: each image stays in its part when others come or go.

        Raises:
            ConfigError: A part is empty.
        """
        limit = int(fraction * 2**32)
        is_val = np.array([_hash(self.keys[number]) < limit for number in self.numbers.tolist()], dtype=bool)  # [N]
        if is_val.all() or not is_val.any():
            reason = f"{count(len(self), 'image')} leave none for {'training' if is_val.all() else 'validation'}"
            raise ConfigError(f"data.val_fraction={fraction}", reason, "data.val_path=<images for validation>")
        train, val = (
            replace(self, numbers=self.numbers[chosen], targets=self.targets[torch.from_numpy(chosen)])
            for chosen in (~is_val, is_val)
        )
        return train, val

    def join(self, other: Self) -> Self:
        """Return both parts of `divide` in the order of the whole."""
        numbers = np.concatenate([self.numbers, other.numbers])
        order = np.argsort(numbers)
        targets = torch.cat([self.targets, other.targets])[torch.from_numpy(order)]
        return replace(self, numbers=numbers[order], targets=targets)

    @property
    def fingerprint(self) -> str:
        """String that is equal for equal keys, targets and names of classes."""
        found = hashlib.blake2b(digest_size=8)
        for number in self.numbers.tolist():
            found.update(self.keys[number].encode("utf-8", "surrogateescape") + b"\0")
        found.update(self.targets.numpy().tobytes() + "\0".join(self.class_names or ()).encode())
        return f"{type(self.store).__name__}/{len(self)}/{found.hexdigest()}"


@dataclass(kw_only=True)
class ImageSource:
    """A data source whose images are decoded when they are read, and augmented by (seed, position).

    Args:
        val_fraction: Part of the images that are for validation where they have none of their own, chosen by a hash.
        transform: What is made of an image.
        on_bad_image: What an image that cannot be decoded is: an `error`, or `skip`: the next one stands in its place,
            and the log names the first ones and counts them all.
    """

    sample_kind: ClassVar[str] = "images"

    val_fraction: Annotated[float, "> 0, < 1"]
    transform: ImageTransform
    on_bad_image: OnBadImage

    _holds_out_all: ClassVar[bool] = False

    def hold_out_all(self) -> None:
        """Validate on all images, where they have none of their own for it; before `prepare`."""
        self._holds_out_all = True  # type: ignore[misc]

    def list_splits(self) -> dict[str, ImageSplit]:
        """Return `train`, `val` and perhaps `test`; called once, by `prepare`.

        Raises:
            ConfigError: There are no images, or their targets are not what they should be.
        """
        raise NotImplementedError

    def prepare(self) -> None:
        """List the images; a second call does nothing.

        Raises:
            ConfigError: See `list_splits`; or Pillow is not installed.
        """
        if hasattr(self, "_images"):
            return
        import_pillow()
        self._splits = self.list_splits()
        train, val = self._splits["train"], self._splits["val"]
        if self._holds_out_all and val.store is train.store:
            self._splits["val"] = train.join(val)
        self._images = {split: self.open_split(split, of) for split, of in self._splits.items()}

    def open_split(self, split: str, of: Any) -> "Images":
        """Return the samples of a split; called once for each, by `prepare`.

        Args:
            split: Its name.
            of: One of those that `list_splits` returned.
        """
        return Images(of, self.transform, skips=self.on_bad_image == "skip")

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None: the samples are not text."""
        return None

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes or labels, by number; None: the targets are values. After `prepare`."""
        return self._splits["train"].class_names

    @property
    def fingerprint(self) -> str:
        """String that is equal for equal training samples; after `prepare`."""
        return f"{self._splits['train'].fingerprint}/{self.transform.describe()}/{self.transform.describe_eval()}"

    @property
    def val_fingerprint(self) -> str:
        """String that is equal for equal validation samples; after `prepare`."""
        return f"{self._splits['val'].fingerprint}/{self.transform.describe_eval()}"

    def describe(self) -> str:
        """Return the numbers of images and classes, and what is drawn."""
        counts = ", ".join(f"{len(images):,} {_SPLIT_NAMES[split]} images" for split, images in self._splits.items())
        targets, names = self._splits["train"].targets, self.class_names
        if names is None:
            what = count(targets.shape[1], "value")
        elif targets.ndim == 2:
            what = f"{count(len(names), 'label')}, {float(targets.sum(dim=1).mean()):.3g} of them per image"
        else:
            of_each = Counter(targets.tolist()).values()
            balance = f"{min(of_each):,}" if min(of_each) == max(of_each) else f"{min(of_each):,} to {max(of_each):,}"
            what = f"{len(names)} classes of {balance} in training"
        drawn = f"{counts}; {what}; it draws {self.transform.describe()}"
        return "; ".join(filter(None, (drawn, self.transform.describe_origin())))

    def train(self) -> "Images":
        """Return the training samples."""
        return self._images["train"]

    def val(self) -> "Images":
        """Return the validation samples."""
        return self._images["val"]

    def test(self) -> "Images | None":
        """Return the test samples; None: there are none."""
        return self._images.get("test")

    def count_classes(self) -> dict[str, int]:
        """Return the training images of each class or label by its name; empty for values."""
        targets, names = self._splits["train"].targets, self.class_names
        if names is None:
            return {}
        of_each = targets.sum(dim=0) if targets.ndim == 2 else torch.bincount(targets, minlength=len(names))
        return dict(zip(names, of_each.int().tolist(), strict=True))

    def describe_sample(self, index: int) -> dict[str, str]:
        """Return where a training image is, for the record of a step."""
        split = self._splits["train"]
        return {"image": split.store.name(int(split.numbers[index]))}

    def describe_skipped(self) -> str:
        """Return how many images were replaced so far, in any process of this machine; empty: none."""
        counts = {split: images.num_skipped for split, images in self._images.items() if images.num_skipped}
        shown = " and ".join(
            f"{number:,} of {count(len(self._splits[split]), f'{_SPLIT_NAMES[split]} image')}"
            for split, number in counts.items()
        )
        return f"{shown} could not be decoded, and the next one stood in their place" if shown else ""


class Images(Dataset[dict[str, Tensor]]):
    """Images by index, as a validation sees them, and as random samples.

    Args:
        split: Images and targets.
        transform: What is made of an image.
        skips: Whether the next image stands in the place of one that cannot be decoded.
    """

    tokens_per_sample: int = 0

    def __init__(self, split: ImageSplit, transform: ImageTransform, *, skips: bool) -> None:
        self._split = split
        self._transform = transform
        # shared with the loader processes, which find them
        self._is_bad = torch.zeros(len(split), dtype=torch.bool).share_memory_() if skips else None  # [N]
        self.targets_per_sample: int | None = 1 if split.targets.ndim == 1 else split.targets.shape[1]
        if not transform.mixing.is_on:
            self.mix_pair = None  # type: ignore[assignment, method-assign]

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return the sample of a validation, as `sample`; views are drawn, and always the same."""
        if self._transform.views > 1:
            return self.sample(index, rng_at(0, index))
        image, place = self._read(index)
        return {"inputs": self._transform(image).contiguous(), "targets": self._split.targets[place]}

    def sample(self, index: int, rng: Generator) -> dict[str, Tensor]:
        """Return the sample as it is drawn: inputs [C, S, S], or [views, C, S, S]; targets [] int64 or [V] float."""
        image, place = self._read(index)
        return {"inputs": self._draw(image, rng), "targets": self._split.targets[place]}

    def mix_pair(
        self, first: dict[str, Tensor], second: dict[str, Tensor], rng: Generator, position: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return two neighbours of the stream, mixed with each other: inputs [C, S, S], targets [V] float."""
        epoch, num_classes = position / len(self), len(self._split.class_names or ())
        return self._transform.mix_pair(first, second, rng, epoch=epoch, num_classes=num_classes)

    @property
    def num_values(self) -> int:
        """Numbers of a sample, C S S."""
        return self._transform.num_channels * self._transform.pixels.size**2

    @property
    def num_skipped(self) -> int:
        """Images that could not be decoded so far."""
        return 0 if self._is_bad is None else int(self._is_bad.sum())

    def find_bad(self, indices: Iterable[int]) -> Iterator[tuple[str, str]]:
        """Yield the name of each of these images that cannot be decoded, and why."""
        for index in indices:
            number = int(self._split.numbers[index])
            try:
                decode(self._split.store.read(number), self._transform.num_channels)
            except BadImageError as error:
                yield self._split.store.name(number), str(error)

    def _draw(self, image: Tensor, rng: Generator) -> Tensor:
        """Return random samples of an image, [C, S, S] or [views, C, S, S]."""
        # transforms of one's own may draw from any of them, though only torch's is promised
        with seeded_generators(rng) if self._transform.extra else seeded_torch(rng):
            # stacking would keep other strides in this process, and not in loader processes, and they change sums
            views = [self._transform.draw(image).contiguous() for _ in range(self._transform.views)]
        return views[0] if len(views) == 1 else torch.stack(views)

    def _read(self, index: int) -> tuple[Tensor, int]:
        """Return an image [C, H, W] uint8, and its place in the split: the given one, or the next where it is skipped.

        Raises:
            ConfigError: It cannot be decoded.
        """
        split, total = self._split, len(self._split)
        if not -total <= index < total:
            raise IndexError(f"image {index} of {total}")
        for step in range(min(_MAX_TRIES, total)):
            place = (index + step) % total
            number = int(split.numbers[place])
            try:
                image = decode(split.store.read(number), self._transform.num_channels)
            except BadImageError as error:
                if self._is_bad is None:
                    fix = "data.on_bad_image=skip, or the data without it"
                    raise ConfigError(split.store.name(number), str(error), fix) from error
                if not self._is_bad[place]:
                    self._is_bad[place] = True
                    self._log_bad(number, error)
            else:
                return image, place
        reason = f"none of {min(_MAX_TRIES, total)} images in a row can be decoded"
        raise ConfigError("data.on_bad_image=skip", reason, "data.on_bad_image=error, which names the first of them")

    def _log_bad(self, number: int, error: BadImageError) -> None:
        if self.num_skipped <= _NUM_NAMED:
            more = "; further ones are counted, not named" if self.num_skipped == _NUM_NAMED else ""
            name = self._split.store.name(number)
            LOGGER.warning("%s: %s; the next image stands in its place%s", name, error, more)


def list_names(names: Sequence[str]) -> str:
    """Return the first few of some names, for an error."""
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return ", ".join(map(repr, names[:_NUM_NAMED])) + more


def _hash(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=4).digest(), "big")
