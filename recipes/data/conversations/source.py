"""Data source for fine-tuning on conversations, or on prompts with answers."""

import functools
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from recipes.cache import open_cache_dir
from recipes.data.conversations.chat_template import TRAINING_DAY, ChatTemplate, find_template
from recipes.data.conversations.conversation import Reader
from recipes.data.conversations.image_parts import MARK, ImageFinder, ImageTokens
from recipes.data.conversations.loss_mask import ExampleTokenizer
from recipes.data.conversations.rows import ExampleRows, ImageReader, pad_rows
from recipes.data.conversations.store import AnyReader, Encoder, ExampleStore, cached_examples, name_examples
from recipes.data.image_file import OnDemand, check_header
from recipes.data.read_rows import Rows, check_split, open_rows
from recipes.data.text.token_cache import SPLIT_TEXT
from recipes.errors import ConfigError
from recipes.files import count
from recipes.runtime.world import num_cores
from recipes.tokenizer import TextCorpus, Tokenizer, TokenizerConfig
from recipes.transform.images import ImageTransform

LOGGER = logging.getLogger("lightning_recipes")

_SHOWN_PLACES = 3
_ROWS_WITHOUT = "rows without an answer to learn are"
_SHOWN_FIELDS = 8
_SHOWN_CHARACTERS = 200  # of the names of all fields


class Conversations:
    """Examples from rows of `path`: JSONL, JSON, CSV or Parquet files, or a hub dataset.

    Attributes:
        packs: Whether samples hold several examples and `positions`.
    """

    sample_kind: ClassVar[str] = "tokens"
    has_answers: ClassVar[bool] = True
    fine_tunes: ClassVar[bool] = True  # rows from which random weights learn nothing of use
    pads_samples: ClassVar[bool] = True  # also a packed row, after its last example

    def __init__(
        self,
        *,
        path: str,
        format: Literal["messages", "sharegpt", "prompt_completion", "alpaca", "text"] | None,
        fields: Mapping[str, str | None],
        chat_template: str,
        train_on: Literal["answers", "last_answer", "all"],
        packing: bool,
        val_path: str | None,
        val_fraction: Annotated[float, "> 0, < 0.9"],
        split: str,
        tokenizer: TokenizerConfig,
        seq_len: Annotated[int, ">= 1"],
        image_folder: str | None,
        image_token_id: Annotated[int, ">= 0"] | None,
        image_seq_length: Annotated[int, ">= 1"] | None,
        transform: ImageTransform | None,
        cache_dir: str,
        vocab_size: Annotated[int, ">= 1"] | None = None,
        num_processes: Annotated[int, ">= 1, <= 256"] | None = None,
    ) -> None:
        """Store the settings; nothing is read before `prepare`.

        Args:
            path: File, folder or glob, or `hf://` and a dataset id.
            format: Format of the rows; None: detected from their fields.
            fields: Field name in the format -> field name in this dataset, or None for a field that is not to be read.
            chat_template: Chat template: `auto`, `chatml`, the name of one of several of the tokenizer, or a file.
            train_on: Tokens with a loss: the `answers`, the `last_answer`, or `all`.
            packing: Whether several examples share a row, without attending to each other.
            val_path: Rows for validation; None: split from `path`.
            val_fraction: Fraction of `path` for validation, by a hash of the first question, so that equal questions
                stay in one split, whatever the system message; of rows with images, by a hash of the first image.
            split: Split of a hub dataset.
            tokenizer: Config of the tokenizer, which is trained on these rows if necessary.
            seq_len: Tokens per row, those of images among them.
            image_folder: Folder of the images that rows name by paths; None: that of the file of the rows.
            image_token_id: Token of the model that stands for a part of an image; None: it reads no images, and rows
                with images are refused.
            image_seq_length: Tokens of an image.
            transform: What is made of an image, in training as in validation; None or an empty mapping: rows have none.
            cache_dir: Folder of cached tokens and tokenizers.
            vocab_size: Vocabulary size of the model; None: any.
            num_processes: Processes that tokenize; None: one per core.

        Raises:
            ConfigError: There is no tokenizer, `fields` has an unknown name, or the transform does not suit images
                that are asked about.
        """
        if not hasattr(tokenizer, "make"):
            raise ConfigError(
                "tokenizer=none",
                "text needs a tokenizer",
                "tokenizer=bytes, or tokenizer=huggingface tokenizer.name=<folder or hub id>",
            )
        check_split(split, {"data.path": path} | ({} if val_path is None else {"data.val_path": val_path}))
        self.seq_len = seq_len
        self._path = path
        self._val_path = val_path
        self._val_fraction = val_fraction
        self._image_folder = image_folder
        self._images: ImageReader | None = None
        if image_token_id is not None:
            assert image_seq_length is not None, "a model has both"
            self._images = ImageReader(ImageTokens(image_token_id, image_seq_length), _check_transform(transform))
        reads_images = self._images is not None
        way = "" if reads_images else "model=llava, which reads images"
        self._reader: AnyReader = Reader(format=format, fields=fields, reads_images=reads_images, way_to_images=way)
        self._format = f"{format} {sorted(fields.items(), key=str)}"
        self._template = chat_template
        self._train_on = train_on
        self.packs = packing
        self._hub_split = split
        self._tokenizer_config = tokenizer
        self._cache_dir = cache_dir
        self._known_ids = vocab_size
        self._num_processes = num_processes
        self._held_out = np.zeros(0, dtype=np.uint64)  # questions that another source validates on
        self._opened: dict[str, Rows] = {}
        self._names = dict[str, str]()  # of the examples of each file, wherever they and their images lie
        self._prepared: tuple[Tokenizer, dict[str, ExampleStore], dict[str, ExampleRows]] | None = None

    def hold_out_all(self) -> None:
        """Use all rows of `path` for validation; called before `prepare`, by modes that do not train."""
        self._val_path, self._val_fraction = None, 1.0

    def split_texts(self) -> NDArray[np.void]:
        """Return the split of each question, as `SPLIT_TEXT`; it is not cut: its number of tokens is given as 1."""
        stores = self._ready()[1]
        found = []
        for name, store, examples in self._splits(stores):
            texts = np.ones(len(examples), dtype=SPLIT_TEXT)
            texts["key"], texts["num_train"] = store.questions[examples], name == "train"
            found.append(texts)
        return np.concatenate(found)

    def hold_out(self, keys: NDArray[np.uint64], num_train: NDArray[np.int64]) -> int:
        """Do not train on questions of which no token is to be trained on; return the number of such examples.

        They become validation examples, unless those are rows of `val_path`.

        Args:
            keys: Sorted hashes of the questions.
            num_train: Tokens of each to train on.

        Raises:
            ConfigError: No example is left for training.
        """
        tokenizer, stores, _ = self._ready()
        before = {name: len(examples) for name, _, examples in self._splits(stores)}
        self._held_out = np.array(keys[num_train == 0])
        splits = {name: (store, examples) for name, store, examples in self._splits(stores)}
        num_held_out = before["train"] - len(splits["train"][1])
        if num_held_out:
            rows = {name: self._rows(store, examples, name) for name, (store, examples) in splits.items()}
            self._prepared = tokenizer, stores, rows
        return num_held_out

    def corpus(self) -> TextCorpus:
        """Return the text of the training rows, with a hash of it.

        Raises:
            ConfigError: There are no rows.
        """
        cache_dir = open_cache_dir(self._cache_dir)
        rows = self._open("path", self._path)
        content = f"{rows.content_hash(cache_dir)} {self._format}"
        return _RowTexts(rows, self._reader, content_hash=content, cache_dir=cache_dir)

    def make_tokenizer(self, corpus: TextCorpus) -> Tokenizer:
        """Return the configured tokenizer, trained on `corpus` if necessary."""
        return self._tokenizer_config.make(corpus)

    def prepare(self, tokenizer: Tokenizer | None = None) -> None:
        """Tokenize the rows unless they are cached, and pack them; a second call does nothing.

        Args:
            tokenizer: Tokenizer shared with other data; None: the configured one.

        Raises:
            ConfigError: A row cannot be read, its answers cannot be located, or a split is empty.
        """
        if self._prepared is not None:
            return
        cache_dir = open_cache_dir(self._cache_dir)
        sources = {"train": self._open("path", self._path)}
        if self._val_path is not None:
            sources["val"] = self._open("val_path", self._val_path)
        hashes = {name: rows.content_hash(cache_dir) for name, rows in sources.items()}
        tokenizer = tokenizer or self.make_tokenizer(self.corpus())
        tokenizer.check_model(self._known_ids)
        template = find_template(self._template, tokenizer, day=TRAINING_DAY)
        made_by: tuple[str, ...] = (
            self._format,
            tokenizer.fingerprint,
            str(tokenizer.special_tokens),
            repr(template),
            self._train_on,
        )
        made_by += () if self._images is None else (repr(self._images.tokens), self._image_folder or "")
        keys = {name: "\0".join((found, *made_by)) for name, found in hashes.items()}
        self._names = {name: name_examples(key) for name, key in keys.items()}
        finder, num_ids = None, tokenizer.vocab_size
        if self._images is not None:
            finder, num_ids = ImageFinder(self._image_folder, check_header), max(num_ids, self._images.tokens.id + 1)
        try:
            stores = {
                name: cached_examples(
                    rows,
                    setting=f"data.{'path' if name == 'train' else 'val_path'}={rows.name}",
                    reader=self._reader,
                    tokenizer=self._make_encoder(tokenizer, template),
                    vocab_size=num_ids,
                    key=keys[name],
                    cache_dir=cache_dir,
                    num_processes=self._num_processes or num_cores(),
                    finder=finder,
                    image_folder=self._find_image_folder(rows),
                )
                for name, rows in sources.items()
            }
        except ConfigError as mistake:
            explained = self._explain_two_files(mistake, sources)
            if explained is None:
                raise
            raise explained from mistake
        rows = {name: self._rows(store, examples, name) for name, store, examples in self._splits(stores)}
        if any(store.meta.num_conversations for store in stores.values()):
            self._warn_of_template(template, stores)
            if template.source != tokenizer.chat_template:
                tokenizer = tokenizer.with_chat_template(template.source)
        elif self._template != "auto":
            LOGGER.warning("data.chat_template=%s is not used: no row is a conversation", self._template)
        self._prepared = tokenizer, stores, rows
        self._warn(stores, rows)

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer with the chat template; after `prepare`."""
        return self._ready()[0]

    @property
    def collate(self) -> Callable[[Sequence[Any]], Any] | None:
        """Collate function; None: all samples have the same length."""
        is_stacked = self.packs and self._images is None
        return None if is_stacked else functools.partial(pad_rows, seq_len=self.seq_len)

    @property
    def fingerprint(self) -> str:
        """Equal for equal samples."""
        self._ready()
        own = f"{'+'.join(self._names.values())}/{self._val_fraction}/{self._how_read()}"
        if not len(self._held_out):
            return own
        return f"{own}/{hashlib.blake2b(self._held_out.tobytes(), digest_size=12).hexdigest()}"

    @property
    def val_fingerprint(self) -> str:
        """Equal for equal validation samples."""
        self._ready()
        examples = hashlib.blake2b(self.val().examples.tobytes(), digest_size=12).hexdigest()
        return f"{self._names.get('val', self._names['train'])}/{examples}/{self._how_read()}"

    def _how_read(self) -> str:
        """Return what samples depend on beside the examples, for the fingerprints."""
        read = f"{self.seq_len}/{'packed' if self.packs else 'padded'}"
        return read if self._images is None else f"{read}/{self._images.transform.describe_eval()}"

    @property
    def image_reader(self) -> ImageReader | None:
        """Reads images as training does; None: there are none."""
        return self._images

    @property
    def noun(self) -> str:
        """What a sample is, in words."""
        return "example"

    def describe(self) -> str:
        """Return the amount of data, the fraction of training tokens with a loss, and the fields that are not read."""
        rows, not_read = self._ready()[2], self._describe_unread()
        if "train" not in rows:
            number = count(rows["val"].num_examples, f"validation {self.noun}")
            return f"{number}{self._describe_images()}{not_read}"
        train, val = rows["train"], rows["val"]
        fill = train.num_inputs / (len(train) * self.seq_len)
        packed = f" in {count(len(train), 'row')} of {self.seq_len}, {fill:.0%} full" if self.packs else ""
        counts = f"{train.num_examples:,} training{packed} and {count(val.num_examples, f'validation {self.noun}')}"
        share = train.num_targets / train.num_inputs
        trained = f"{train.num_targets:,} of {train.num_inputs:,} training tokens carry loss ({share:.0%})"
        return f"{counts}; {trained}{self._describe_images()}{not_read}"

    def _describe_images(self) -> str:
        """Return how many images the examples have, which of them are not read, and what is made of one."""
        rows = self._ready()[2]
        if self._images is None or not any(found.num_images + found.num_images_cut for found in rows.values()):
            return ""
        names = {"train": "training", "val": "validation"}
        counts = " and ".join(f"{found.num_images:,} of {names[split]}" for split, found in rows.items())
        num_cut = sum(found.num_images_cut for found in rows.values())
        cut = f", and {num_cut:,} more behind the end of rows that are cut" if num_cut else ""
        size = self._images.transform.pixels.eval_size
        parts = [
            f"images: {counts}{cut}, {self._images.tokens.length} tokens each",
            f"all are resized to {size} x {size} as in validation, and nothing of them is drawn",
            self._images.transform.describe_origin(),
        ]
        return "; ".join(["", *filter(None, parts)])

    def describe_sample(self, sample: int) -> dict[str, Any]:
        """Return the origin of the examples in a training row, and its text, for the dump of a bad batch."""
        _, stores, rows = self._ready()
        store = stores["train"]
        examples = rows["train"].examples_of(sample)
        texts = [self._spell(store.tokens(example, stop=self.seq_len + 1)) for example in examples]
        documents: list[dict[str, Any]] = [{"name": store.place(example)} for example in examples]
        if self._images is not None:
            for document, files in zip(documents, rows["train"].list_images(sample), strict=True):
                document |= {"images": [file or "in the row" for file in files]} if files else {}
        return {"documents": documents, "text": "\n\n".join(texts)}

    def _spell(self, tokens: NDArray[np.int64]) -> str:
        """Return tokens as text, with `<image>` for those of an image."""
        decode = self.tokenizer.decode
        if self._images is None:
            return decode(tokens.tolist())
        return self._images.tokens.spell(tokens[: self._images.tokens.shorten(tokens)], decode)

    def train(self) -> ExampleRows:
        """Return the training rows."""
        return self._ready()[2]["train"]

    def val(self) -> ExampleRows:
        """Return the validation rows, the same for every seed."""
        return self._ready()[2]["val"]

    def questions(self, num_samples: int) -> list[tuple[list[int], list[int]]]:
        """Return prompt and last answer of at most `num_samples` evenly spaced validation examples, as tokens.

        The end of a turn is part of an answer. Examples that exceed the model's window are skipped.
        """
        return [(prompt, answer) for _, prompt, answer in self._find_questions(num_samples)]

    def question_rows(self, num_samples: int) -> list[Mapping[str, Any]]:
        """Return the fields of the row of each of `questions`; reads the file once up to the last of them."""
        name = "path" if self._val_path is None else "val_path"
        store = self._ready()[1]["train" if self._val_path is None else "val"]
        places = [store.place(example) for example, _, _ in self._find_questions(num_samples)]
        waiting, found = set(places), dict[str, Mapping[str, Any]]()
        for row in self._open(name, self._path if self._val_path is None else self._val_path):
            if not waiting:
                break
            if row.place in waiting:
                waiting.remove(row.place)
                found[row.place] = row.parse()
        return [found.get(place, {}) for place in places]

    def question_images(self, num_samples: int) -> Sequence[Tensor]:
        """Return the images of each of `questions`, [N, C, S, S] float32, in the order of their tokens; none: [0, …].

        They are read when they are asked for, and a `ConfigError` says if one cannot be decoded.
        """
        images, store = self._images, self._ready()[1]["val" if "val" in self._ready()[1] else "train"]
        assert images is not None, "for a model that reads images"
        questions = [
            (example, images.tokens.count(np.array(prompt))) for example, prompt, _ in self._find_questions(num_samples)
        ]
        return OnDemand(len(questions), lambda number: images.stack(images.read(store, *questions[number])))

    def _make_encoder(self, tokenizer: Tokenizer, template: ChatTemplate) -> Encoder:
        images = None if self._images is None else self._images.tokens
        return ExampleTokenizer(tokenizer, template, train_on=self._train_on, images=images)

    def _find_image_folder(self, rows: Rows) -> str:
        """Return the folder that paths of images are relative to; empty if there is none, as of a hub dataset."""
        if self._images is None:
            return ""
        folder = os.path.expanduser(self._image_folder or rows.name)
        return os.path.abspath(folder) if os.path.exists(folder) else ""

    def _describe_unread(self) -> str:
        unread = dict[str, int]()
        for store in self._ready()[1].values():
            unread |= {name: unread.get(name, 0) + num for name, num in store.meta.unread.items()}
        shown = [f"{name} ({count(num, 'row')})" for name, num in [*unread.items()][:_SHOWN_FIELDS]]
        more = f" and {len(unread) - len(shown)} more" if len(unread) > len(shown) else ""
        return f"; fields not read: {', '.join(shown)}{more}" if shown else ""

    def _find_questions(self, num_samples: int) -> Iterator[tuple[int, list[int], list[int]]]:
        """Yield the number of an example, its prompt and its last answer."""
        _, stores, rows = self._ready()
        store = stores["val" if "val" in stores else "train"]
        examples = rows["val"].examples
        whole = examples[store.lengths[examples] <= self.seq_len]
        chosen = whole[np.unique(np.arange(num_samples) * len(whole) // num_samples)] if len(whole) else whole
        for example in chosen.tolist():
            is_answer = store.is_answer(example)
            if not is_answer.any():
                continue
            last = int(np.flatnonzero(is_answer)[-1])
            before = np.flatnonzero(~is_answer[: last + 1])
            if len(before):
                first, tokens = int(before[-1]) + 1, store.tokens(example).tolist()
                yield example, tokens[:first], tokens[first : last + 1]

    def _splits(self, stores: dict[str, ExampleStore]) -> Iterator[tuple[str, ExampleStore, NDArray[np.int64]]]:
        train = stores["train"]
        is_held_out = np.isin(train.questions, self._held_out)
        if "val" in stores:
            yield "train", train, np.flatnonzero(~is_held_out)
            yield "val", stores["val"], np.arange(len(stores["val"]), dtype=np.int64)
            return
        if self._val_fraction >= 1:
            yield "val", train, np.arange(len(train), dtype=np.int64)
            return
        is_val = is_held_out | (train.questions < _find_limit(train.questions, self._val_fraction)[0])
        yield "train", train, np.flatnonzero(~is_val)
        yield "val", train, np.flatnonzero(is_val)

    def _rows(self, store: ExampleStore, examples: NDArray[np.int64], split: str) -> ExampleRows:
        rows = self._make_rows(store, examples)
        if len(rows):
            return rows
        if len(examples):
            longest = int(store.lengths[examples].min())
            reason = f"no answer of the {split} split begins within {self.seq_len} tokens"
            fix = f"seq_len={longest} or more, and model.max_seq_len={longest} or more if it is smaller"
            raise ConfigError(f"seq_len={self.seq_len}", reason, f"{fix}; or shorter prompts")
        fix = "data.val_path=<rows>, or data.path=<rows with more questions>"
        questions = count(len(np.unique(store.questions)), "question")
        reason = f"the {split} split is empty: {count(len(store), 'example')} with {questions}"
        raise ConfigError(f"data.path={self._path}", reason, fix)

    def _make_rows(self, store: ExampleStore, examples: NDArray[np.int64]) -> ExampleRows:
        return ExampleRows(store, examples, seq_len=self.seq_len, packs=self.packs, images=self._images)

    def _explain_two_files(self, mistake: ConfigError, sources: Mapping[str, Rows]) -> ConfigError | None:
        """Return the error for rows of other fields in `val_path`: what is typed for one file is wrong for the other.

        None if the mistake is another one.
        """
        firsts = [next(iter(rows), None) for rows in sources.values()]
        found = [row.parse() for row in firsts if row is not None]
        if len(found) < 2 or all(map(self._reader.has_fields, found)) or {*found[0]} == {*found[1]}:
            return None
        fix = self._reader.suggest_fields(found)
        shown = [_shorten(", ".join(row)) for row in found]
        reason = f"its rows have the fields {shown[1]}, those of data.path {shown[0]}, and data.fields is for both"
        typed = f"data.val_path={self._val_path}"
        return ConfigError(typed, reason, fix or "data.val_path=<rows with the fields of data.path>")

    def _warn_of_template(self, template: ChatTemplate, stores: dict[str, ExampleStore]) -> None:
        """Log what the template leaves out of the examples, or adds to them."""
        if not any(store.meta.num_ending for store in stores.values()):
            LOGGER.warning(
                "The template of %s ends no answer with a token that is trained on and stops a generation: the model"
                " will not learn to stop. data.chat_template=<file.jinja> with the end of a turn inside of"
                " {%% generation %%} trains on it",
                template.name,
            )
        hidden = {name: num for store in stores.values() for name, num in store.meta.hidden.items()}
        if hidden:
            shown = ", ".join(f"{name} ({count(num, 'row')})" for name, num in [*hidden.items()][:_SHOWN_FIELDS])
            LOGGER.warning("The template of %s does not show everything. Not trained on: %s", template.name, shown)
        if template.writes_date:
            LOGGER.info("The template of %s writes a date: %s in every example", template.name, TRAINING_DAY)

    def _warn(self, stores: dict[str, ExampleStore], rows: dict[str, ExampleRows]) -> None:
        """Log the rows and tokens that are not trained on."""
        for store in stores.values():
            if dropped := store.meta.dropped:
                places = ", ".join(dropped[:_SHOWN_PLACES]) + (", …" if len(dropped) > _SHOWN_PLACES else "")
                rows_without = count(len(dropped), "row without an answer to learn is", _ROWS_WITHOUT)
                LOGGER.warning("%s skipped: %s", rows_without, places)
            for reason, left_out in store.meta.left_out.items():
                places = ", ".join(left_out[:_SHOWN_PLACES]) + (", …" if len(left_out) > _SHOWN_PLACES else "")
                LOGGER.warning("%s left out, because %s: %s", _are(len(left_out)), reason, places)
            for name in store.meta.absent:
                LOGGER.warning("data.fields names the field %s, which no row has", name)
        if "val" in stores:
            num_known = int(np.isin(stores["val"].questions, stores["train"].questions).sum())
            if num_known:
                LOGGER.warning(
                    "%d of %d examples of data.val_path begin with a question that training examples begin with, or are"
                    " about the same image"
                    if self._images is not None
                    else "%d of %d examples of data.val_path begin with a question that training examples begin with",
                    *(num_known, len(stores["val"])),
                )
        elif self._val_fraction < 1 and _find_limit(stores["train"].questions, self._val_fraction)[1]:
            LOGGER.info(
                "data.val_fraction=%s of so few questions would leave a split empty: %s examples are in the validation"
                " split",
                *(self._val_fraction, f"{rows['val'].num_examples:,}"),
            )
        for split, found in rows.items():
            self._warn_of_length(split, found)

    def _warn_of_length(self, split: str, rows: ExampleRows) -> None:
        """Log how many examples of a split are cut, or too long to be read."""
        if rows.num_cut or rows.num_without_targets:
            LOGGER.warning(
                "Of the %s %ss, %d %s cut to %d tokens, and %d %s skipped: answers begin later",
                *(split, self.noun, rows.num_cut, "is" if rows.num_cut == 1 else "are", self.seq_len),
                *(rows.num_without_targets, "is" if rows.num_without_targets == 1 else "are"),
            )

    def _open(self, name: str, path: str) -> Rows:
        if name not in self._opened:
            self._opened[name] = open_rows(path, setting=f"data.{name}", split=self._hub_split)
        return self._opened[name]

    def _ready(self) -> tuple[Tokenizer, dict[str, ExampleStore], dict[str, ExampleRows]]:
        assert self._prepared is not None, "prepare() comes first"
        return self._prepared


def _find_limit(questions: NDArray[np.uint64], val_fraction: float) -> tuple[np.uint64, bool]:
    """Return the hash below which questions are validated on, and whether it was moved so that no split is empty.

    Of few questions, all may be on one side by chance. Of two or more, the one with the smallest hash is always in the
    validation split, and the one with the largest in the training split.
    """
    limit = int(val_fraction * 2.0**64)
    smallest, largest = int(questions.min()), int(questions.max())
    kept = limit if smallest == largest else min(max(limit, smallest + 1), largest)
    return np.uint64(kept), kept != limit


def _check_transform(transform: ImageTransform | None) -> ImageTransform:
    """Return a transform that makes one image of each, and the same one whenever it is read.

    Raises:
        ConfigError: It does not.
    """
    if not transform:
        reason = "the model reads images, and nothing says what is made of one"
        raise ConfigError("transform=none", reason, "transform=clip")
    if transform.mixing.is_on:
        typed = f"transform.mixup={transform.mixup} transform.cutmix={transform.cutmix}"
        raise ConfigError(typed, "no answer is that to a mixed image", "0 for both")
    if transform.views > 1:
        reason = "a question is about an image, and one view of it is read"
        raise ConfigError(f"transform.views={transform.views}", reason, "transform.views=1")
    return transform


def _are(num_rows: int) -> str:
    return "1 row is" if num_rows == 1 else f"{num_rows:,} rows are"


def _shorten(text: str) -> str:
    return f"{text[:_SHOWN_CHARACTERS]}…" if len(text) > _SHOWN_CHARACTERS else text


class _RowTexts:
    """Text of the rows, for training a tokenizer."""

    def __init__(self, rows: Rows, reader: AnyReader, *, content_hash: str, cache_dir: Path) -> None:
        self.cache_dir = cache_dir
        self.content_hash = content_hash
        self._rows = rows
        self._reader = reader

    def texts(self, max_bytes: int) -> Iterator[str]:
        num_bytes = 0
        for row in self._rows:
            for example in self._reader.read_all(row.parse(), place=row.place, from_table=row.from_table):
                for part in (example.prompt or "", example.answer):
                    for text in [part] if isinstance(part, str) else [str(message["content"]) for message in part]:
                        num_bytes += len(text)
                        yield text.replace(MARK, "")
            if num_bytes >= max_bytes:
                return
