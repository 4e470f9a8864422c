"""Images with captions, in the rows of a table or in WebDataset .tar files: `data=image_text`.

A sample of training is an image, and one of its captions is drawn for each reading. A validation reads every pair of an
image and a caption.

Shapes: N images of a split, C channels, S x S pixels of a sample, T tokens of a caption.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from recipes.cache import open_cache_dir
from recipes.data.captions import CaptionColumns, CaptionTokens, hash_caption, list_captions
from recipes.data.image_folder import Files
from recipes.data.image_shards import ImagesInShards
from recipes.data.image_table import ImageRows, locate_validation
from recipes.data.images import Images, ImageSource, ImageSplit, ImageStore, ListedImages, Names, OnBadImage
from recipes.data.read_rows import HUB
from recipes.errors import ConfigError
from recipes.files import count
from recipes.home import expand_home
from recipes.tokenizer import TextCorpus, Tokenizer, TokenizerConfig
from recipes.transform.images import ImageTransform

_SHARD = ".tar"
_NUM_COUNTED = 10_000  # captions whose tokens are counted for the log, a second


class CaptionSource(ImageSource):
    """Images with captions: the tokens of the captions, and what is logged of them.

    Args:
        val_fraction: See `ImageSource`; all captions of an image are in its part.
        tokenizer: Config of the tokenizer, which is trained on the captions of training if necessary.
        seq_len: T; longer captions are cut.
        transform: What is made of an image.
        on_bad_image: What an image that cannot be decoded is, see `ImageSource`.
        cache_dir: Folder of the rows that were read, and of trained tokenizers.
        vocab_size: Vocabulary size of the model; None: any.

    Raises:
        ConfigError: The settings contradict each other.
    """

    sample_kind: ClassVar[str] = "images_and_text"
    pads_samples: ClassVar[bool] = True

    def __init__(
        self,
        *,
        val_fraction: float,
        tokenizer: TokenizerConfig,
        seq_len: int | None,
        transform: ImageTransform,
        on_bad_image: OnBadImage,
        cache_dir: str,
        vocab_size: int | None,
    ) -> None:
        super().__init__(val_fraction=val_fraction, transform=transform, on_bad_image=on_bad_image)
        if not hasattr(tokenizer, "make"):
            fix = "tokenizer=bpe, or tokenizer=huggingface tokenizer.name=<folder or hub id>"
            raise ConfigError("tokenizer=none", "captions need a tokenizer", fix)
        if transform.mixing.is_on:
            reason = "a mixed image has no caption"
            raise ConfigError(
                f"transform.mixup={transform.mixup} transform.cutmix={transform.cutmix}", reason, "0 for both"
            )
        if transform.views > 1:
            reason = "an image is compared with captions, and one view of it is read"
            raise ConfigError(f"transform.views={transform.views}", reason, "transform.views=1")
        self._tokenizer_config = tokenizer
        assert seq_len is not None, "the check of the config has found a model that reads no captions"
        self._seq_len = seq_len
        self._cache_dir = cache_dir
        self._vocab_size = vocab_size
        self._tokens: CaptionTokens | None = None

    @override
    def prepare(self, tokenizer: Tokenizer | None = None) -> None:
        """List the images, and make the tokenizer; a second call does nothing.

        Args:
            tokenizer: Tokenizer shared with other data; None: the configured one.

        Raises:
            ConfigError: See `list_splits`; or the tokenizer has more tokens than the model.
        """
        if self._tokens is None and tokenizer is not None:
            self._tokens = CaptionTokens(tokenizer, seq_len=self._seq_len)
        super().prepare()

    @override
    def open_split(self, split: str, of: "CaptionedSplit") -> "CaptionedImages":
        if self._tokens is None:
            tokenizer = self.make_tokenizer(self.corpus())
            tokenizer.check_model(self._vocab_size)
            self._tokens = CaptionTokens(tokenizer, seq_len=self._seq_len)
        kind = CaptionedImages if split == "train" else CaptionPairs
        return kind(of, self.transform, self._tokens, skips=self.on_bad_image == "skip")

    def corpus(self) -> TextCorpus:
        """Return the captions of training, with a hash of them; after `prepare`."""
        return _CaptionTexts(self._get_split("train"), cache_dir=open_cache_dir(self._cache_dir))

    def make_tokenizer(self, corpus: TextCorpus) -> Tokenizer:
        """Return the configured tokenizer, trained on `corpus` if necessary."""
        return self._tokenizer_config.make(corpus)

    @property
    @override
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of the captions; after `prepare`."""
        return None if self._tokens is None else self._tokens.tokenizer

    def encode_caption(self, caption: str) -> tuple[Tensor, Tensor]:
        """Return the tokens of a text, as of a caption: see `CaptionTokens.encode`; after `prepare`."""
        return self._get_tokens().encode(caption)

    def open_files(self, paths: Sequence[Path], classes: Sequence[int]) -> Images:
        """Return images in files as a validation sees them, with their classes as targets."""
        files = Files(Path(), Names(map(str, paths)))
        split = ImageSplit.whole(files, torch.tensor(classes, dtype=torch.int64), None)
        return Images(split, self.transform, skips=self.on_bad_image == "skip")

    @property
    @override
    def fingerprint(self) -> str:
        """String that is equal for equal training samples; after `prepare`."""
        return f"{super().fingerprint}/{self._get_tokens().fingerprint}"

    @property
    @override
    def val_fingerprint(self) -> str:
        """String that is equal for equal validation samples; after `prepare`."""
        return f"{super().val_fingerprint}/{self._get_tokens().fingerprint}"

    @override
    def describe(self) -> str:
        """Return the numbers of images and captions, what of these is cut or repeated, and what is drawn."""
        train, val = self._get_split("train"), self._get_split("val")
        per_image = train.num_pairs / len(train)
        parts = [
            f"{len(train):,} training images of {per_image:.3g} caption{'' if per_image == 1 else 's'} each, and"
            f" {val.num_pairs:,} validation pairs of {count(len(val), 'image')}",
            self._describe_cut(train),
        ]
        if repeated := train.count_repeated():
            what = "is that of an image before" if repeated == 1 else "are those of images before"
            parts.append(f"{count(repeated, 'caption')} of training {what}, too")
        if empty := train.num_empty + (val.num_empty if val.captions is not train.captions else 0):
            parts.append(f"{count(empty, 'empty caption')} left out")
        parts += [
            f"it draws a caption of each image, and {self.transform.describe()}",
            self.transform.describe_origin(),
        ]
        return "; ".join(filter(None, parts))

    def _describe_cut(self, split: "CaptionedSplit") -> str:
        """Return the share of captions, and of tokens, that T cuts, by captions spread evenly over a split."""
        tokens, total = self._get_tokens(), split.num_pairs
        num_tried = min(total, _NUM_COUNTED)
        texts = [split.get_caption(*split.find_pair(number * total // num_tried)) for number in range(num_tried)]
        lengths = np.array([tokens.count(text) for text in texts], dtype=np.int64)
        cut = (lengths - tokens.room).clip(min=0)
        looked_at = "" if num_tried == total else f" of {num_tried:,} looked at"
        return (
            f"{float((cut > 0).mean()):.2%} of the captions{looked_at} are cut to {self._seq_len} tokens, and lose"
            f" {int(cut.sum()) / max(int(lengths.sum()), 1):.2%} of all tokens"
        )

    def describe_drawn(self, index: int, rng: Generator) -> dict[str, str]:
        """Return where a training image is, and its caption, for the record of a step.

        Args:
            index: Of the image.
            rng: Generator of the sample.
        """
        caption = self._get_split("train").get_caption(index, draw_caption(rng))
        return self.describe_sample(index) | {"caption": caption}

    def _get_split(self, split: str) -> "CaptionedSplit":
        found = self._splits[split]
        assert isinstance(found, CaptionedSplit), found
        return found

    def _get_tokens(self) -> CaptionTokens:
        assert self._tokens is not None, "prepared"
        return self._tokens


class ImageText(CaptionSource):
    """One image and its captions per row, or per sample of a shard; rows with the same image are one image.

    Args:
        path: CSV, JSONL, JSON, Parquet or Arrow: a file, a folder or a glob; `hf://` and the id of a hub dataset; or
            .tar files of WebDataset: one, a folder or a glob of them, local or as in `s3://bucket/*.tar`.
        image: Column of the image: a path, relative to the file of the table; or bytes. Not read of .tar files.
        caption: Column of the captions, or several: each cell is a text or a list of texts. Of .tar files `txt`, the
            text of that member, or a field of the member `json`.
        val_path: Images for validation, as in `path`; None: a part of `path`.
        split: Split of a hub dataset.
        val_split: Split of the same hub dataset for validation; None: a part of `split`.
        val_fraction: See `ImageSource`; all captions of an image are in its part.
        tokenizer: Config of the tokenizer, which is trained on the captions of training if necessary.
        seq_len: T; longer captions are cut.
        transform: What is made of an image.
        on_bad_image: What an image that cannot be decoded is, see `ImageSource`.
        cache_dir: Folder of the rows that were read, and of trained tokenizers.
        vocab_size: Vocabulary size of the model; None: any.

    Raises:
        ConfigError: The settings contradict each other.
    """

    def __init__(
        self,
        *,
        path: str,
        image: str,
        caption: str | Sequence[str],
        val_path: str | None,
        split: str,
        val_split: str | None,
        val_fraction: Annotated[float, "> 0, < 1"],
        tokenizer: TokenizerConfig,
        seq_len: Annotated[int, ">= 1"] | None,
        transform: ImageTransform,
        on_bad_image: OnBadImage,
        cache_dir: str,
        vocab_size: Annotated[int, ">= 1"] | None,
    ) -> None:
        super().__init__(
            val_fraction=val_fraction,
            tokenizer=tokenizer,
            seq_len=seq_len,
            transform=transform,
            on_bad_image=on_bad_image,
            cache_dir=cache_dir,
            vocab_size=vocab_size,
        )
        self.path = path
        self._split = split
        self._val = locate_validation(path, val_path=val_path, split=split, val_split=val_split)
        self._columns = CaptionColumns.of(caption)
        self._rows = ImageRows(image=image, columns=self._columns, cache_dir=cache_dir)
        self._shards = ImagesInShards(columns=self._columns, cache_dir=cache_dir)

    @override
    def list_splits(self) -> dict[str, ImageSplit]:
        """Read the rows or list the shards.

        Raises:
            ConfigError: There are no images, or one has no caption.
        """
        training = self._read(self.path, "data.path", self._split)
        if self._val is None:
            training, held_out = training.divide(self.val_fraction)
        else:
            held_out = self._read(*self._val)
        return {"train": training, "val": held_out}

    def _read(self, path: str, setting: str, split: str) -> "CaptionedSplit":
        if _are_shards(path, setting):
            return CaptionedSplit.of(self._shards.read(path, setting=setting))
        return CaptionedSplit.of(self._rows.read(path, setting=setting, split=split))


@dataclass(frozen=True, kw_only=True)
class CaptionedSplit(ImageSplit):
    """Images of a split and their captions.

    Attributes:
        captions: Of all images in the store, one after the other.
        begins: [images in the store + 1] int64, where the captions of each begin; of a copy of an image before, which
            is in no split, there are none.
        num_empty: Captions of the store that were empty, and are left out.
    """

    captions: Names
    begins: NDArray[np.int64]
    num_empty: int

    @classmethod
    def of(cls, listed: ListedImages) -> "CaptionedSplit":
        """Return the images of a table or of shards, each once, with the captions of all its copies."""
        first: dict[str, int] = {}
        of_image: list[list[str]] = []
        num_empty = 0
        for number, (image, cells) in enumerate(zip(listed.images, listed.cells, strict=True)):
            captions, empty = list_captions(cells)
            place = first.setdefault(image, number)
            num_empty += empty
            of_image.append([])
            of_image[place] = [*dict.fromkeys([*of_image[place], *captions])]
        numbers = np.fromiter(first.values(), dtype=np.int64, count=len(first))  # [N]
        return cls(
            store=listed.store,
            keys=listed.keys,
            numbers=numbers,
            targets=torch.zeros(len(numbers), dtype=torch.int64),
            class_names=None,
            captions=Names(caption for captions in of_image for caption in captions),
            begins=np.cumsum([0, *map(len, of_image)], dtype=np.int64),
            num_empty=num_empty,
        )

    @classmethod
    def of_one_each(cls, store: ImageStore, keys: Iterable[str], captions: Sequence[str]) -> "CaptionedSplit":
        """Return the images of a store, each with a caption and no class."""
        number = len(captions)
        return cls(
            store=store,
            keys=Names(keys),
            numbers=np.arange(number, dtype=np.int64),
            targets=torch.zeros(number, dtype=torch.int64),
            class_names=None,
            captions=Names(captions),
            begins=np.arange(number + 1, dtype=np.int64),
            num_empty=0,
        )

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """[N] int64, the number of pairs of this split up to and including those of each image."""
        return np.cumsum(self.begins[self.numbers + 1] - self.begins[self.numbers])

    @property
    def num_pairs(self) -> int:
        """Captions of this split, each with its image."""
        return int(self.ends[-1])

    @property
    @override
    def fingerprint(self) -> str:
        """String that is equal for equal images and captions."""
        found = hashlib.blake2b(digest_size=8)
        for index in range(len(self)):
            texts = self.list_captions(index)
            found.update("\0".join([str(len(texts)), *texts, ""]).encode("utf-8", "surrogateescape"))
        return f"{super().fingerprint}/{found.hexdigest()}"

    def get_caption(self, index: int, which: int) -> str:
        """Return a caption of an image, after its last one the first.

        Args:
            index: Of the image in this split.
            which: Of its captions, from 0 on.
        """
        begin, end = self.begins[self.numbers[index] :][:2].tolist()
        return self.captions[begin + which % (end - begin)]

    def list_captions(self, index: int) -> list[str]:
        """Return all captions of an image."""
        begin, end = self.begins[self.numbers[index] :][:2].tolist()
        return [self.captions[number] for number in range(begin, end)]

    def find_pair(self, pair: int) -> tuple[int, int]:
        """Return the image of a pair, by its index in this split, and which caption of the image it is."""
        index = int(np.searchsorted(self.ends, pair, side="right"))
        return index, pair - (int(self.ends[index - 1]) if index else 0)

    def list_texts(self) -> Iterator[str]:
        """Yield all captions of this split, image by image."""
        return (self.get_caption(*self.find_pair(pair)) for pair in range(self.num_pairs))

    def count_repeated(self) -> int:
        """Return the number of captions that an image before has, too."""
        hashes = np.fromiter(map(hash_caption, self.list_texts()), dtype=np.int64, count=self.num_pairs)
        return len(hashes) - len(np.unique(hashes))


class CaptionedImages(Images):
    """Images by index with their first caption, and as random samples with one that is drawn.

    Args:
        split: Images and captions.
        transform: What is made of an image.
        tokens: Makes tokens of a caption.
        skips: Whether the next image, with a caption of its own, stands in the place of one that cannot be decoded.
    """

    def __init__(self, split: CaptionedSplit, transform: ImageTransform, tokens: CaptionTokens, *, skips: bool) -> None:
        super().__init__(split, transform, skips=skips)
        self._captioned = split
        self._tokens = tokens

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return an image as a validation sees it, with its first caption; see `sample`."""
        return self._get_pair(index, 0)

    @override
    def sample(self, index: int, rng: Generator) -> dict[str, Tensor]:
        """Return the sample as it is drawn, first its caption.

        Returns:
            inputs [C, S, S] float; tokens [T] int64; is_token [T] bool, False for padding; caption [] int64, equal for
            equal captions; image [] int64, the number of the image in its split; targets [] int64, 0.
        """
        which = draw_caption(rng)
        image, place = self._read(index)
        return {"inputs": self._draw(image, rng)} | self._describe_pair(place, which)

    def read_pixels(self, index: int) -> Tensor:
        """Return an image as it is in its file, [C, H, W] uint8."""
        return self._read(index)[0]

    def find_caption(self, index: int, number: int) -> str:
        """Return the caption of an image by its number, `hash_caption`."""
        return next(caption for caption in self._captioned.list_captions(index) if hash_caption(caption) == number)

    def _get_pair(self, index: int, which: int) -> dict[str, Tensor]:
        image, place = self._read(index)
        return {"inputs": self._transform(image).contiguous()} | self._describe_pair(place, which)

    def _describe_pair(self, place: int, which: int) -> dict[str, Tensor]:
        """Return all of a sample but its image."""
        caption = self._captioned.get_caption(place, which)
        tokens, is_token = self._tokens.encode(caption)
        return {
            "tokens": tokens,
            "is_token": is_token,
            "caption": torch.tensor(hash_caption(caption)),
            "image": torch.tensor(place),
            "targets": self._captioned.targets[place],
        }


class CaptionPairs(CaptionedImages):
    """Every image with every one of its captions, in order; arguments: see `CaptionedImages`."""

    sample: ClassVar[None] = None  # type: ignore[assignment]  # read by index

    @override
    def __len__(self) -> int:
        return self._captioned.num_pairs

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a pair, see `CaptionedImages.sample`."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        return self._get_pair(*self._captioned.find_pair(index % len(self)))

    @override
    def find_bad(self, indices: Iterable[int]) -> Iterator[tuple[str, str]]:
        images = dict.fromkeys(self._captioned.find_pair(index)[0] for index in indices)
        return super().find_bad(images)


def draw_caption(rng: Generator) -> int:
    """Draw which caption of an image is read, of any number of them."""
    return int(rng.integers(1 << 62))


class _CaptionTexts:
    """Captions to train a tokenizer on."""

    def __init__(self, split: CaptionedSplit, *, cache_dir: Path) -> None:
        self._captions = split
        self.cache_dir = cache_dir

    @property
    def content_hash(self) -> str:
        return self._captions.fingerprint

    def texts(self, max_bytes: int) -> Iterator[str]:
        """Yield captions until they have so many bytes."""
        left = max_bytes
        for text in self._captions.list_texts():
            left -= len(text.encode("utf-8", "replace"))
            yield text
            if left <= 0:
                return


def _are_shards(path: str, setting: str) -> bool:
    """Return whether a path is of .tar files: by its name, as one in a store, or as a folder that holds some."""
    if path.startswith(HUB):
        return False
    if "://" in path or path.lower().endswith(_SHARD):
        return True
    folder = expand_home(path, setting)
    return folder.is_dir() and any(file.suffix.lower() == _SHARD for file in folder.rglob("*"))
