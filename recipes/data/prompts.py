"""Data source for reinforcement learning: prompts that a model answers, with what rewards compare the answers to.

Shapes: B samples, P tokens of a prompt.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from recipes.data.conversations.chat_template import ChatTemplate
from recipes.data.conversations.conversation import (
    Example,
    Message,
    Reader,
    as_json,
    as_messages,
    parse_messages,
    with_roles,
)
from recipes.data.conversations.loss_mask import PromptTokenizer
from recipes.data.conversations.source import Conversations
from recipes.data.conversations.store import Encoder, ExampleStore
from recipes.data.draws import rng_at
from recipes.data.order import GroupedOrder, Order, ShuffledOrder
from recipes.errors import ConfigError, type_setting
from recipes.files import count
from recipes.numerics.loss import IGNORE_INDEX
from recipes.tokenizer import Tokenizer

LOGGER = logging.getLogger("lightning_recipes")

_ASKED = ("prompt", "instruction", "messages", "conversations")
_TURNS = ("messages", "conversations")  # with the answer, if their last message is the assistant's
_QUESTIONS = ("question", "problem", "query")  # read as `prompt`, if a row has one of them
_GIVEN = ("input", "context", "passage", "choices", "options")  # what a question is about, beside it
# read as `reference`, the first that a row has: of problems, of verl, and of fine-tuning
_OF_VERL = "reward_model.ground_truth"
_REFERENCES = ("answer", "solution", "ground_truth", "target", _OF_VERL, "completion", "output", "response")
# what is added to messages, or cannot be
_ADDED = ("input", "system", "history", "tools", "chat_template_kwargs")
_MEDIA = ("images", "image", "videos", "video", "audios", "audio")
_MESSAGE_FIELDS = ("role", "content", "from", "value")
_FIELDS = (*_ASKED, "reference", *_ADDED, *_MEDIA, *_MESSAGE_FIELDS)
_EMPTY = "the prompt is empty"
_ANY_PROMPT = "'data.fields={prompt: <field of the prompt>}', or rows with one"
_SHOWN_CHARACTERS = 200
_ABSENT = object()


class PromptReader:
    """Turns rows into prompts, each with its reference and its fields.

    Args:
        fields: Field name in the format -> field name in this dataset, where `reward_model.ground_truth` is the field
            `ground_truth` of the object `reward_model`; or any field of this dataset -> None: it is not to be read.

    Raises:
        ConfigError: `fields` has an unknown name.
    """

    def __init__(self, *, fields: Mapping[str, str | None]) -> None:
        for name, own in fields.items():
            if name not in _FIELDS and own is not None:
                reason = f"it maps the names of a format, which are {', '.join((*_ASKED, 'reference', *_ADDED))}"
                fix = type_setting("data.fields", {"reference" if name in _REFERENCES else "prompt": own})
                raise ConfigError(f"data.fields.{name}={own}", reason, fix)
        self._fields = dict(fields)
        self._ignored = {name for name, own in fields.items() if own is None}
        self._maps_messages = not fields.keys().isdisjoint(_MESSAGE_FIELDS)
        rest = {name: own for name, own in fields.items() if name in (*_ADDED, *_MEDIA, *_MESSAGE_FIELDS)}
        self._added = [own for name in (*_ADDED, *_MEDIA) if (own := fields.get(name, name)) is not None]
        self._system = fields.get("system", "system")
        self._reader = Reader(format="prompt_completion", fields=rest)
        self._asked_reader = Reader(format="alpaca", fields=rest)

    def read_all(self, row: Mapping[str, Any], *, place: str, from_table: bool) -> list[Example]:
        """Return the prompt of a row: messages or text, with its reference as the answer, and its fields as a note.

        Raises:
            ConfigError: There is no prompt, or there may be several, or the row has what changes its meaning and is not
                read.
        """
        row = {name: value for name, value in row.items() if name not in self._ignored}
        if from_table:
            row = {name: as_json(value) for name, value in row.items()}
        self._reject_preferences(row, place)
        name, own, asked = self._find_prompt(row, place)
        asked = parse_messages(asked, f"{place}: {own}")
        asked = [asked] if isinstance(asked, Mapping) else asked
        asked = asked if self._maps_messages else with_roles(asked)
        if isinstance(asked, str) and name in _TURNS:
            fix = type_setting("data.fields", self._without(name) | {"prompt": own})
            raise ConfigError(place, f"its {own} is text, and no list of messages", f"{fix}, or messages there")
        if isinstance(asked, str) and self._system is not None and isinstance(row.get(self._system), str):
            asked = as_messages(asked, "user")  # also with an empty system message: rows with and without are of a form
        reference = self._find_reference(row, place, beside=own)
        if asked is None or asked == [] or (isinstance(asked, str) and not asked.strip()):
            return [Example(place=place, prompt=None, answer="", left_out=_EMPTY)]
        example = self._read(row, name, asked, reference or "", place)
        if isinstance(example.prompt, list):
            *before, last = example.prompt
            if last["role"] == "assistant":
                if name == "prompt":
                    reason = f"its {own} ends with a message of the assistant, and it is the model's turn to answer"
                    fix = type_setting("data.fields", self._without(name) | {"messages": own})
                    raise ConfigError(place, reason, f"{fix}, which takes that message as the reference")
                reference = last["content"] if reference is None else reference
                last = before[-1] if before else {"content": ""}
            else:
                before = example.prompt
            if not last["content"].strip():
                return [Example(place=place, prompt=None, answer="", left_out=_EMPTY)]
            return [self._with_row(example, before, as_messages(reference or "", "assistant"), row)]
        return [self._with_row(example, example.prompt, example.answer, row)]

    def has_fields(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row has a field of prompts."""
        try:
            self._find_prompt(row, "")
        except ConfigError:
            return False
        return True

    def suggest_fields(self, rows: Sequence[Mapping[str, Any]]) -> str | None:
        """Return None: the fields that two files have in common need not be what is asked."""
        return None

    def _read(self, row: Mapping[str, Any], name: str, asked: Any, reference: str, place: str) -> Example:
        """Return a prompt with what other fields of the row add to it: messages without the reference, or texts."""
        rest = {own: row[own] for own in self._added if own in row}
        if name == "instruction" and isinstance(asked, str):
            read = {**rest, "instruction": asked, "output": reference}
            example = self._asked_reader.read(read, place=place)
            messages = [*(example.prompt or []), *example.answer][:-1]
        elif isinstance(asked, str):
            return self._reader.read({**rest, "prompt": asked, "completion": reference}, place=place)
        else:
            example = self._reader.read({**rest, "prompt": asked, "completion": []}, place=place)
            messages = [*(example.prompt or [])]
        return replace(example, prompt=messages)

    def _with_row(
        self, example: Example, prompt: list[Message] | str | None, answer: list[Message] | str, row: Mapping[str, Any]
    ) -> Example:
        """Return a prompt with its reference, the row as JSON beside it and the names of what JSON cannot hold."""
        kept, unread = dict[str, Any](), list[str]()
        for name, value in row.items():
            try:
                json.dumps(value)
            except TypeError:  # bytes, such as those of an image
                unread.append(str(name))
            else:
                kept[name] = value
        reference = answer if isinstance(answer, str) else answer[-1]["content"]
        known = tuple(dict.fromkeys([*example.unread, *unread]))
        return replace(example, prompt=prompt, answer=answer, unread=known, note=json.dumps([reference, kept]))

    def _reject_preferences(self, row: Mapping[str, Any], place: str) -> None:
        for pair, held, recipe in (
            (("chosen", "rejected"), "a chosen and a rejected answer", "dpo"),
            (("completion", "label"), "an answer and its label", "kto"),
        ):
            if "reference" not in self._fields and all(row.get(name) is not None for name in pair):
                ignored = type_setting("data.fields", self._fields | dict.fromkeys(pair))
                reason = f"it holds {held}, and the answers to learn from are those that the model generates"
                raise ConfigError(place, reason, f"recipe={recipe}, which learns them, or {ignored}, for its prompt")

    def _find_prompt(self, row: Mapping[str, Any], place: str) -> tuple[str, str, Any]:
        """Return the name in the format of what is asked, its field in this dataset, and the value.

        Raises:
            ConfigError: There is none, or several.
        """
        for name in _ASKED:
            if (mapped := self._fields.get(name)) is not None:
                if (value := _look_up(row, mapped)) is _ABSENT:
                    guess = self._guess(row)
                    fix = _ANY_PROMPT if guess is None else type_setting("data.fields", self._fields | {name: guess})
                    raise ConfigError(place, f"it has no field {mapped}; its fields are {_names(row)}", fix)
                return name, mapped, value
        known = [name for name in (*_ASKED, *_QUESTIONS) if name in row]
        for name in ("prompt", *_TURNS):
            if name in known and row[name] is not None:
                return name, name, row[name]
        texts = [name for name in known if row[name] is not None]
        if len(texts) > 1:
            reason = f"its {' and '.join(texts)} may each be the prompt"
            fix = type_setting("data.fields", self._fields | {"prompt": texts[-1]})
            raise ConfigError(place, reason, f"{fix}, or another of them")
        if not known:
            raise self._find_no_prompt(row, place)
        name = (texts or known)[0]
        kind = name if name in _ASKED else "prompt"
        given = next((each for each in _GIVEN if row.get(each)), None)
        if given is not None and "input" not in self._fields and not (kind == "instruction" and given == "input"):
            whole = "rows whose prompt holds both"
            if isinstance(row[given], str):
                both = type_setting("data.fields", self._fields | {"instruction": name, "input": given})
                whole = f"{both}, a message with both"
            alone = type_setting("data.fields", self._fields | {kind: name})
            reason = f"its {name} may be about its {given}, which would not be in the prompt"
            raise ConfigError(place, reason, f"{whole}, or {alone}, without it")
        return kind, name, row[name]

    def _find_no_prompt(self, row: Mapping[str, Any], place: str) -> ConfigError:
        wanted = ", ".join(("prompt", "messages", *_QUESTIONS))
        reason = f"its fields are {_names(row)}, expected {wanted} or instruction"
        guess = self._guess(row)
        known = None if guess is None else type_setting("data.fields", self._fields | {"prompt": guess})
        return ConfigError(place, reason, known or _ANY_PROMPT)

    def _guess(self, row: Mapping[str, Any]) -> str | None:
        """Return the field of a row that is the likeliest prompt: messages, or the first text that is no reference."""
        lists = [name for name, value in row.items() if isinstance(value, list) and value and _is_message(value[0])]
        texts = [
            name for name, value in row.items() if isinstance(value, str) and name not in ("reference", *_REFERENCES)
        ]
        known = [name for name in (*_QUESTIONS, "input", "text") if name in texts]
        return next(iter([*lists, *known, *texts]), None)

    def _find_reference(self, row: Mapping[str, Any], place: str, *, beside: str) -> str | None:
        """Return the reference of a row; None: it has none, or that of its messages.

        Raises:
            ConfigError: It holds bytes that are no text.
        """
        own = self._fields.get("reference", "reference")
        names = [own] if "reference" in self._fields else [own, *_REFERENCES]
        for name in names:
            if name is None or name == beside:
                continue
            value = _look_up(row, name)
            if value is not _ABSENT and value is not None:
                try:
                    return _to_text(value)
                except TypeError as error:
                    fix = type_setting("data.fields", self._fields | {"reference": None})
                    raise ConfigError(place, f"its {name} holds bytes, and a reference is text", fix) from error
        return "" if "reference" in self._fields else None

    def _without(self, name: str) -> dict[str, str | None]:
        return {key: own for key, own in self._fields.items() if key != name}


def _look_up(row: Mapping[str, Any], name: str) -> Any:
    """Return a field, or that of an object in a field by a name with dots; `_ABSENT` if there is none."""
    if name in row:
        return row[name]
    first, dot, rest = name.partition(".")
    inner = row.get(first)
    if dot and isinstance(inner, str) and inner.lstrip().startswith("{"):  # as JSON, of a CSV file
        try:
            inner = json.loads(inner)
        except ValueError:
            return _ABSENT  # a text in braces
    return _look_up(inner, rest) if dot and isinstance(inner, Mapping) else _ABSENT


def _to_text(value: Any) -> str:
    """Return a reference as text: of a list of one its only item, of a message its content, all else as JSON.

    Raises:
        TypeError: It holds bytes.
    """
    if isinstance(value, list) and len(value) == 1:
        return _to_text(value[0])
    if _is_message(value) and isinstance(value.get("content"), str):
        return str(value["content"])
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and not value.keys().isdisjoint(("role", "from"))


def _names(row: Mapping[str, Any]) -> str:
    names = ", ".join(map(str, row)) or "none"
    return f"{names[:_SHOWN_CHARACTERS]}…" if len(names) > _SHOWN_CHARACTERS else names


class PromptRows(Dataset[dict[str, Tensor]]):
    """Prompts of a split, each with the seed that its completion is sampled with.

    An epoch reads each `num_reads` times. Prompts that leave no room for `max_new_tokens` in `seq_len` are left out.

    Args:
        store: All prompts, each with its reference.
        examples: Indices of the prompts in this split.
        seq_len: Tokens of a prompt and its completion, at most.
        max_new_tokens: Tokens of a completion, at most.
        num_generations: Completions of each prompt.
        num_iterations: Optimizer steps on each global batch of completions.
        global_batch_size: Completions of an optimizer step.

    Attributes:
        examples: Indices of the prompts that fit.
        lengths: Tokens of each, [N].
        num_reads: Samples of each prompt in an epoch, of which `num_generations` differ.
        num_too_long: Number of prompts that are left out.
        longest: Tokens of the longest prompt, also of those that are left out.
    """

    targets_per_sample: int | None = None

    def __init__(
        self,
        store: ExampleStore,
        examples: NDArray[np.int64],
        *,
        seq_len: int,
        max_new_tokens: int,
        num_generations: int,
        num_iterations: int,
        global_batch_size: int,
    ) -> None:
        self.tokens_per_sample = seq_len  # at most
        self._store = store
        self._num_generations = num_generations
        self._num_iterations = num_iterations
        self._global_batch_size = global_batch_size
        self.num_reads = num_generations * num_iterations
        lengths = (store.lengths - store.num_targets)[examples]
        fits = lengths <= seq_len - max_new_tokens
        self.examples, self.lengths = examples[fits], lengths[fits]
        self.num_too_long = int((~fits).sum())
        self.longest = int(lengths.max(initial=0))

    @property
    def num_examples(self) -> int:
        """Number of prompts."""
        return len(self)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a prompt as `sample` does, with a seed that depends on the index alone."""
        return self.sample(index, rng_at(0, index % max(len(self), 1)))

    def sample(self, index: int, rng: Generator) -> dict[str, Tensor]:
        """Return `prompt` [P] int64, `row` [] for `Prompts.rows_of`, and `seed` [] of its completion, 0 to 2^32 - 1.

        `inputs` is `prompt`; there are no targets, which are yet to be generated.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        example = int(self.examples[index])
        prompt = torch.from_numpy(self._store.tokens(example, stop=int(self.lengths[index])))
        return {
            "prompt": prompt,
            "inputs": prompt,
            "row": torch.tensor(example),
            "seed": torch.tensor(int(rng.integers(2**32))),
        }

    def padding(self) -> dict[str, Tensor]:
        """Return a sample that fills up a validation: its `row` is -1."""
        return self[0] | {"row": torch.tensor(-1)}

    def make_order(self, seed: int) -> Order:
        """Return the order of the stream: a prompt `num_generations` times, a global batch `num_iterations` times."""
        return GroupedOrder(
            ShuffledOrder(len(self), seed),
            group_size=self._num_generations,
            block_size=self._global_batch_size,
            num_reads=self._num_iterations,
        )

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples that the stream yields before a prompt has its second group of completions."""
        return len(self) * self.num_reads

    def count_new(self) -> int:
        """Return `samples_per_epoch`."""
        return self.samples_per_epoch

    def count_epochs(self, num_samples: int) -> dict[str, float]:
        """Return how often the first `num_samples` samples of the stream go through the prompts."""
        return {"the prompts": num_samples / self.samples_per_epoch}

    def examples_of(self, index: int) -> list[int]:
        """Return the prompt of a sample, by its index in the store."""
        return [int(self.examples[index])]


def pad_prompts(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch: `prompt` [B, P] int64, padded at the end with 0, `num_prompt` [B], `row` [B] and `seed` [B].

    `inputs` is `prompt`, and no token of `targets` [B, P] carries loss.
    """
    prompts = [sample["prompt"] for sample in samples]
    padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    stacked = {name: torch.stack([sample[name] for sample in samples]) for name in ("row", "seed")}
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    empty = torch.full_like(padded, IGNORE_INDEX)
    return stacked | {"prompt": padded, "num_prompt": lengths, "inputs": padded, "targets": empty}


class Prompts(Conversations):
    """Prompts from rows of `path`: JSONL, JSON, CSV or Parquet files, or a hub dataset."""

    target_kind: ClassVar[str] = "completions"

    def __init__(
        self,
        *,
        fields: Mapping[str, str | None],
        num_generations: Annotated[int, ">= 1"] | None,
        num_iterations: Annotated[int, ">= 1"] | None,
        global_batch_size: Annotated[int, ">= 1"],
        max_new_tokens: Annotated[int, ">= 1"] | None,
        **settings: Any,
    ) -> None:
        """Store the settings; nothing is read before `prepare`.

        Args:
            fields: Field name in the format -> field name in this dataset, or None for a field that is not to be read.
            num_generations: Completions of each prompt; None: there is no rollout, which is refused.
            num_iterations: Optimizer steps on each global batch of completions; None likewise.
            global_batch_size: Completions of an optimizer step.
            max_new_tokens: Tokens of a completion, at most; prompt and completion fit into `seq_len`; None likewise.
            **settings: As for `Conversations`.

        Raises:
            ConfigError: Nothing says how prompts are completed.
        """
        if num_generations is None or num_iterations is None or max_new_tokens is None:
            reason = "nothing completes these prompts: the run has no rollout"
            raise ConfigError("data=prompts", reason, "recipe=grpo, or data=conversations to learn the answers of rows")
        super().__init__(
            format="prompt_completion",
            fields={},
            train_on="answers",
            packing=False,
            image_folder=None,
            image_token_id=None,
            image_seq_length=None,
            transform=None,
            **settings,
        )
        assert self.seq_len > max_new_tokens, (self.seq_len, max_new_tokens)  # see recipes.config.check.policy
        self._fields = dict(fields)
        self._reader = PromptReader(fields=fields)
        self._format = f"prompts {sorted(fields.items(), key=str)}"
        self._num_generations = num_generations
        self._num_iterations = num_iterations
        self._global_batch_size = global_batch_size
        self._max_new_tokens = max_new_tokens

    @property
    @override
    def collate(self) -> Callable[[Sequence[Any]], Any]:
        return pad_prompts

    @override
    def prepare(self, tokenizer: Tokenizer | None = None) -> None:
        is_first = self._prepared is None
        super().prepare(tokenizer)
        if not is_first:
            return
        stores = self._ready()[1].values()
        own = self._fields.get("reference")
        if own is not None and not any((store.num_targets > 1).any() for store in stores):
            reason = "no row has a reference there"
            raise ConfigError(f"data.fields.reference={own}", reason, "'data.fields={reference: <another field>}'")
        if self.tokenizer.chat_template and not any(store.meta.num_conversations for store in stores):
            LOGGER.warning(
                "The tokenizer has a chat template, and no row is a conversation: plain text is continued. For a model"
                " that chats: 'data.fields={instruction: <field of the prompt>}', which makes a message of the user of"
                " each"
            )

    @property
    @override
    def fingerprint(self) -> str:
        read = f"{self._num_generations}x{self._num_iterations}"
        read += f"x{self._global_batch_size}" if self._num_iterations > 1 else ""
        return f"{super().fingerprint}/{self._max_new_tokens}/{read}"

    @property
    @override
    def noun(self) -> str:
        return "prompt"

    @override
    def describe(self) -> str:
        """Return the number of prompts, their lengths, how many have a reference, and the fields that are not read."""
        stores, rows = self._ready()[1:]
        splits: Mapping[str, Any] = rows
        names = {"train": "training", "val": "validation"}
        counts = " and ".join(f"{len(splits[split]):,} {name}" for split, name in names.items() if split in splits)
        lengths = np.concatenate([found.lengths for found in splits.values()])
        num_rows = sum(map(len, stores.values()))
        num_references = sum(int((store.num_targets > 1).sum()) for store in stores.values())
        known = "all with" if num_references == num_rows else f"{num_references:,} of {num_rows:,} rows have"
        return (
            f"{counts} prompts of {lengths.min()} to {lengths.max()} tokens, {lengths.mean():.0f} on average;"
            f" {known if num_references else 'none with'} a reference{self._describe_unread()}"
        )

    @override
    def describe_sample(self, sample: int) -> dict[str, Any]:
        """Return the origin of a training prompt and its text, for the dump of a bad batch."""
        rows: Any = self.train()
        place = self._ready()[1]["train"].place(int(rows.examples[sample]))
        return {"documents": [{"name": place}], "text": self.tokenizer.decode(rows[sample]["prompt"].tolist())}

    def rows_of(self, indices: Sequence[int], split: str) -> list[tuple[str, str, Mapping[str, Any]]]:
        """Return prompt, reference and fields of rows: the text of the tokens that the model reads, and as in the data.

        Args:
            indices: `row` of samples; empty texts and no fields for -1, that of padding.
            split: "train" or "val".
        """
        store = self._store_of(split)
        return [self._row_of(store, index) if index >= 0 else ("", "", {}) for index in indices]

    @override
    def question_rows(self, num_samples: int) -> list[Mapping[str, Any]]:
        """Return the fields of the row of each of `questions`."""
        store = self._store_of("val")
        return [self._row_of(store, example)[2] for example, _, _ in self._find_questions(num_samples)]

    def _row_of(self, store: ExampleStore, example: int) -> tuple[str, str, Mapping[str, Any]]:
        reference, fields = json.loads(store.note(example))
        num_prompt = store.length(example) - int(store.num_targets[example])
        return self.tokenizer.decode(store.tokens(example, stop=num_prompt).tolist()), reference, fields

    def _store_of(self, split: str) -> ExampleStore:
        stores = self._ready()[1]
        return stores[split if split in stores else "train"]

    @override
    def _find_questions(self, num_samples: int) -> Any:
        """Yield the number of a prompt, its tokens and its reference, however long that is."""
        rows: Any = self.val()
        store = self._store_of("val")
        for index in np.unique(np.arange(num_samples) * len(rows) // num_samples).tolist():
            tokens, num_prompt = store.tokens(int(rows.examples[index])).tolist(), int(rows.lengths[index])
            yield int(rows.examples[index]), tokens[:num_prompt], tokens[num_prompt:]

    @override
    def _make_encoder(self, tokenizer: Tokenizer, template: ChatTemplate) -> Encoder:
        return PromptTokenizer(tokenizer, template)

    @override
    def _rows(self, store: ExampleStore, examples: NDArray[np.int64], split: str) -> Any:
        rows: Any = self._make_rows(store, examples)
        longest = self.seq_len - self._max_new_tokens
        if len(examples) and not len(rows):
            shortest = int((store.lengths - store.num_targets)[examples].min())
            reason = f"no prompt of the {split} split fits into the {longest} tokens beside a completion"
            fix = f"seq_len={shortest + self._max_new_tokens} or more, and model.max_seq_len, too, if it is smaller"
            raise ConfigError(f"seq_len={self.seq_len}", reason, f"{fix}; or a smaller rollout.max_new_tokens")
        num_read = -(-self._global_batch_size // self._num_generations)
        if split == "train" and len(examples) and len(rows) < num_read:
            beside = f", beside {rows.num_too_long:,} too long ones" if rows.num_too_long else ""
            reason = f"the train split has {count(len(rows), 'prompt')}{beside}, and a step reads {num_read:,}"
            step = f"global_batch_size={self._global_batch_size} with rollout.num_generations={self._num_generations}"
            fix = f"global_batch_size={len(rows) * self._num_generations} or less, or data.path=<more prompts>"
            raise ConfigError(f"data.path={self._path}", f"{reason} ({step})", fix)
        return rows if len(rows) else super()._rows(store, examples, split)

    @override
    def _warn_of_length(self, split: str, rows: Any) -> None:
        if rows.num_too_long:
            total = len(rows) + rows.num_too_long
            LOGGER.warning(
                "Of the %s %s prompts, %s left out: longer than seq_len - rollout.max_new_tokens = %d tokens, the"
                " longest of %d. seq_len=%d, with as large a model.max_seq_len, or a smaller rollout.max_new_tokens"
                " keeps them",
                *(f"{total:,}", split, count(rows.num_too_long, "is", "are"), self.seq_len - self._max_new_tokens),
                *(rows.longest, rows.longest + self._max_new_tokens),
            )

    @override
    def _make_rows(self, store: ExampleStore, examples: NDArray[np.int64]) -> Any:
        return PromptRows(
            store,
            examples,
            seq_len=self.seq_len,
            max_new_tokens=self._max_new_tokens,
            num_generations=self._num_generations,
            num_iterations=self._num_iterations,
            global_batch_size=self._global_batch_size,
        )
