"""Data source for preferences: rows of a better and a worse answer to a prompt, or of answers that are good or bad.

Shapes: B samples, T tokens of a row. A batch of pairs has 2 B rows: the chosen answer of each pair, then the rejected.
"""

import functools
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from recipes.data.comparisons import check_decided, explain, name_prompt, scores_disagree
from recipes.data.conversations.conversation import (
    Example,
    Message,
    Reader,
    as_messages,
    parse_messages,
    with_roles,
)
from recipes.data.conversations.rows import PAD_TO
from recipes.data.conversations.source import Conversations
from recipes.data.conversations.store import ExampleStore
from recipes.data.draws import rng_at
from recipes.data.packed_batch import Packing, plan_packing
from recipes.errors import ConfigError, shell
from recipes.files import count
from recipes.numerics.loss import IGNORE_INDEX

LOGGER = logging.getLogger("lightning_recipes")
Kind = Literal["pairs", "answers"]

_OWN_FIELDS = ("prompt", "chosen", "rejected", "completion", "label", "margin")
_EQUAL, _EMPTY = "both answers are the same", "an answer is empty"
_SWAPPED = "the rejected answer has the higher score"
# of transcripts such as those of Anthropic/hh-rlhf
_TURN = "\n\nAssistant:"
_BEFORE_TURN = re.compile(r"(?=\n\n(?:Human|Assistant):)")
_ASIDE = re.compile(
    rf"\n\nHuman:.*?(?=\n\n(?:Human|Assistant):|\Z)|{_TURN}", re.DOTALL
)  # what the assistant does not say
_LABELS = {"true": 1, "1": 1, "good": 1, "false": 0, "0": 0, "bad": 0}
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_MAX_DRAWS = 64
_NUM_EXAMINED = 100


class PreferenceReader:
    """Turns rows into the examples of both answers, or of one that is labelled.

    Args:
        kind: `pairs`, or `answers`, which also takes the two of a pair as a good and a bad one.
        fields: Field name in the format -> field name in this dataset, or None for a field that is not to be read.

    Raises:
        ConfigError: `fields` has an unknown name.
    """

    def __init__(self, *, kind: Kind, fields: Mapping[str, str | None]) -> None:
        self._kind = kind
        self._typed = dict(fields)
        self._fields = {name: own for name, own in fields.items() if name in _OWN_FIELDS}
        rest = {name: own for name, own in fields.items() if name not in _OWN_FIELDS}
        self._system = fields.get("system", "system")
        self._maps_messages = not fields.keys().isdisjoint(("role", "content"))
        try:
            self._reader = Reader(format="prompt_completion", fields=rest)
        except ConfigError as error:
            known = ", ".join(_OWN_FIELDS)
            raise ConfigError(error.setting, f"{error.reason}; of preferences {known}", error.fix) from error

    def read_all(self, row: Mapping[str, Any], *, place: str, from_table: bool) -> list[Example]:
        """Return the chosen and the rejected answer of a row, or its only one.

        Raises:
            ConfigError: A field is missing or has the wrong type, or the row has what changes its meaning and is not
                read.
        """
        own = {self._name(row, name) for name in _OWN_FIELDS}
        row = {name: parse_messages(value, f"{place}: {name}") if name in own else value for name, value in row.items()}
        chosen, rejected = self._get(row, "chosen"), self._get(row, "rejected")
        rest = {name: value for name, value in row.items() if name not in own}
        # also an empty one: rows with and without a system message are of one form
        is_chat = self._system is not None and isinstance(row.get(self._system), str)
        names = str(self._name(row, "chosen")), str(self._name(row, "rejected"))
        if chosen is not None and rejected is not None:
            check_decided(row, names, place)
            try:
                prompt, *answers = _divide(self._get(row, "prompt"), chosen, rejected, is_chat, place)
            except _NoPromptError as error:
                raise ConfigError(place, error.reason, f"{name_prompt(row)}{error.fix}") from error
            values = [1.0, 0.0] if self._kind == "answers" else [self._margin(row, place), math.nan]
            why = _EQUAL if answers[0] == answers[1] else _SWAPPED if scores_disagree(row) else ""
        elif self._get(row, "completion") is None and all(name in row for name in names):  # one of them is null
            prompt, answers, values, why = None, [None, None], [], _EMPTY
        else:
            prompt, answers = self._get(row, "prompt"), [self._get(row, "completion")]
            values, why = [self._label(row, place)], ""
            if prompt is None and isinstance(answers[0], list):  # a whole conversation
                prompt, answers = answers[0][:-1], [answers[0][-1:]]
            if prompt is None and isinstance(answers[0], str) and _TURN in answers[0]:  # a whole transcript
                end = answers[0].rindex(_TURN) + len(_TURN)
                prompt, answers = answers[0][:end], [answers[0][end:]]
            if isinstance(prompt, str) and is_chat:
                prompt, answers = as_messages(prompt, "user"), [as_messages(answers[0], "assistant")]
        why = why or (_EMPTY if any(map(_is_empty, answers)) else "")
        if why:
            nothing = Example(place=place, prompt=None, answer="", left_out=why)
            return [nothing] * len(answers)
        examples = [
            self._reader.read({**rest, "prompt": prompt, "completion": answer}, place=place, from_table=from_table)
            for answer in answers
        ]
        asides = [_find_asides(prompt, answer) for answer in answers]
        return [
            replace(example, value=value, asides=spans)
            for example, value, spans in zip(examples, values, asides, strict=True)
        ]

    def has_fields(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row has the fields of a pair or of a labelled answer."""
        pairs = all(self._get(row, name) is not None for name in ("chosen", "rejected"))
        return pairs or all(self._get(row, name) is not None for name in ("completion", "label"))

    def suggest_fields(self, rows: Sequence[Mapping[str, Any]]) -> str | None:
        """Return None: which of two other fields holds the better answer cannot be seen."""
        return None

    def _name(self, row: Mapping[str, Any], name: str) -> str | None:
        """Return the field of a row that holds a field of the format; None: none is to be read."""
        own = self._fields.get(name, name)
        is_question = name == "prompt" and "prompt" not in self._fields and row.get("prompt") is None
        return "question" if is_question else own

    def _get(self, row: Mapping[str, Any], name: str) -> Any:
        own = self._name(row, name)
        value = None if own is None else row.get(own)
        return value if self._maps_messages else with_roles(value)

    def _margin(self, row: Mapping[str, Any], place: str) -> float:
        value = self._get(row, "margin")
        if value is None:
            return 0.0
        if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):  # of a CSV file, whose cells are text
            value = float(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            fix = "a number there, or 'data.fields={margin: null}'"
            raise ConfigError(place, f"its margin is {str(value)[:40]}, and not a number", fix)
        return float(value)

    def _label(self, row: Mapping[str, Any], place: str) -> float:
        value = self._get(row, "label")
        fields = ", ".join(map(str, row))
        if value is None or self._get(row, "completion") is None:
            wanted = "prompt, chosen and rejected"
            wanted += "" if self._kind == "pairs" else "; or prompt, completion and label"
            known = explain(row, fields=self._typed, place=place)
            if known is not None and (self._kind == "pairs" or value is None):
                raise known
            fix = "'data.fields={chosen: <field of the better answer>, rejected: <field of the worse one>}'"
            if self._kind == "answers":
                fix = "'data.fields={completion: <field of the answer>, label: <field that says whether it is good>}'"
            raise ConfigError(place, f"its fields are {fields}, expected {wanted}", fix)
        if self._kind == "pairs":
            reason = "it has one answer with a label, and this loss compares two answers to a prompt"
            raise ConfigError(place, reason, "recipe=kto, or rows of prompt, chosen and rejected")
        if isinstance(value, str):  # as in a CSV file, whose cells are text
            value = _LABELS.get(value.strip().lower(), value)
        if value not in (0, 1):
            reason = f"its label is {str(value)[:40]}, and an answer is good or bad"
            raise ConfigError(place, reason, "true or false there, or 'data.fields={label: <another field>}'")
        return float(value)


class _NoPromptError(ConfigError):
    """A pair without a prompt; its fix follows the field that may hold it."""


def _are_transcripts(prompt: Any, chosen: str, rejected: str) -> bool:
    """Return whether two texts are whole transcripts, which hold the prompt that is beside them."""
    if not (isinstance(prompt, str) and prompt.strip()):
        return False
    begins = chosen.find(prompt.strip())
    is_shared = begins >= 0 and rejected.startswith(chosen[: begins + len(prompt.strip())])
    return is_shared and all(_BEFORE_TURN.match(text) and _TURN in text for text in (chosen, rejected))


def _divide(prompt: Any, chosen: Any, rejected: Any, is_chat: bool, place: str) -> tuple[Any, Any, Any]:
    """Return prompt, chosen and rejected answer, all of them texts or all lists of messages; texts unless `is_chat`."""
    are_texts = [isinstance(value, str) for value in (chosen, rejected)]
    if any(are_texts) != all(are_texts):
        raise ConfigError(place, "one of its answers is text and the other is not", "two texts, or two lists there")
    if all(are_texts):
        if prompt is None or _are_transcripts(prompt, chosen, rejected):
            prompt, chosen, rejected = _find_prompt(chosen, rejected, place)
        if isinstance(prompt, str) and not is_chat:
            return prompt, chosen, rejected
        return (
            as_messages(prompt, "user"),
            as_messages(chosen, "assistant"),
            as_messages(rejected, "assistant"),
        )
    if isinstance(chosen, Mapping) and isinstance(rejected, Mapping):  # one message each
        chosen, rejected = [chosen], [rejected]
    lists = [value for value in (chosen, rejected) if isinstance(value, list)]
    if len(lists) < 2 or not all(isinstance(message, Mapping) for value in lists for message in value):
        raise ConfigError(place, "its answers are no texts and no lists of messages", "a text, or messages there")
    num_shared = 0
    for one, other in zip(chosen, rejected, strict=False):
        if one != other:
            break
        num_shared += 1
    if num_shared == len(chosen) == len(rejected):
        num_shared = max(num_shared - 1, 0)  # equal, which the caller says
    shared = chosen[:num_shared]
    shared = _join(prompt, shared, place)
    if not shared:
        raise _NoPromptError(place, "its conversations share no first message", ", or rows that begin alike")
    return shared, chosen[num_shared:], rejected[num_shared:]


def _join(prompt: Any, shared: list[Message], place: str) -> list[Message]:
    """Return the prompt of two conversations, of which the first messages are shared and may hold the prompt.

    Raises:
        ConfigError: They begin with another prompt.
    """
    given = [] if prompt is None else as_messages(prompt, "user")
    starts = range(len(shared) - len(given) + 1)
    if isinstance(prompt, str) and prompt.strip() in [str(text).strip() for each in shared for text in each.values()]:
        return shared
    if not given or any(shared[start : start + len(given)] == given for start in starts):
        return shared
    if not shared or given[-len(shared) :] == shared:
        return given
    if shared[0].get("role") in ("system", "user"):
        reason = "its prompt is not in its conversations, which begin with another one"
        raise ConfigError(place, reason, "'data.fields={prompt: null}', which takes what they share")
    return [*given, *shared]


def _find_prompt(chosen: str, rejected: str, place: str) -> tuple[str, str, str]:
    """Divide two transcripts at the first turn that differs, after the name of the assistant if it is its turn."""
    turns, others = _BEFORE_TURN.split(chosen), _BEFORE_TURN.split(rejected)
    num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(turns, others, strict=False)))
    if num_shared == len(turns) == len(others):
        num_shared -= 1  # equal, which the caller says
    length = len("".join(turns[:num_shared]))
    if chosen.startswith(_TURN, length) and rejected.startswith(_TURN, length):
        length += len(_TURN)
    if not length:
        raise _NoPromptError(place, "it has no prompt", "")
    return chosen[:length], chosen[length:], rejected[length:]


def _find_asides(prompt: Any, answer: Any) -> tuple[tuple[int, int], ...]:
    """Return the spans of an answer in a transcript that the assistant does not say."""
    if not (isinstance(prompt, str) and isinstance(answer, str) and _BEFORE_TURN.search(prompt)):
        return ()
    return tuple(match.span() for match in _ASIDE.finditer(answer))


def _is_empty(answer: Any) -> bool:
    """Return whether an answer says nothing, and calls no tool."""
    if isinstance(answer, list):
        last = answer[-1] if answer else None
        return not isinstance(last, Mapping) or not (last.get("content") or last.get("value") or last.get("tool_calls"))
    return not isinstance(answer, str) or not answer.strip()


class PreferenceRows(Dataset[dict[str, Tensor]]):
    """Pairs of answers, or single ones, each with its prompt in front.

    Answers that begin beyond `seq_len` tokens have nothing to learn: they, and pairs with one of them, are left out.

    Args:
        store: All examples; of pairs the two of each, one after the other.
        examples: Indices of the examples in this split.
        seq_len: Longest row, in tokens; longer ones are cut at their end.
        kind: What a sample is.

    Attributes:
        examples: Indices of the better answers.
    """

    targets_per_sample: int | None = None

    def __init__(self, store: ExampleStore, examples: NDArray[np.int64], *, seq_len: int, kind: Kind) -> None:
        self.seq_len = seq_len
        self._store = store
        self._kind = kind
        num_answers = 2 if kind == "pairs" else 1
        self.tokens_per_sample = num_answers * seq_len  # at most
        of_samples = examples.reshape(-1, num_answers)  # [N, K]
        lengths = store.lengths[of_samples] - 1  # [N, K], inputs
        num_targets = np.array(store.num_targets[of_samples])
        is_cut = lengths > seq_len
        for place in zip(*np.nonzero(is_cut), strict=True):
            num_targets[place] = store.carries_loss(int(of_samples[place]), stop=seq_len + 1)[1:].sum()
        is_kept = np.asarray(num_targets.min(axis=1, initial=1) > 0)  # [N]
        self.num_cut = int(np.asarray(is_cut.any(axis=1))[is_kept].sum())
        self.num_without_targets = int((~is_kept).sum())
        self._samples = of_samples[is_kept]
        self._lengths = np.minimum(lengths[is_kept], seq_len).sum(axis=1)  # [N]
        self.num_inputs, self.num_targets = int(self._lengths.sum()), int(num_targets[is_kept].sum())
        self.values = np.array(store.values[self._samples[:, 0]])  # [N]
        self.examples = self._samples[:, 0] if kind == "pairs" else self._samples[self.values > 0, 0]

    @property
    def num_examples(self) -> int:
        """Number of samples."""
        return len(self)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a sample: `inputs` and `targets` [K, T], `num_inputs` [K], `id` [], and what is known of it.

        The id is a hash of all its tokens. What is known is the `margin` of a pair; of a single answer the `label`, and
        `other_inputs` and `other_targets` [T'], its prompt with the answer to another one.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        index %= len(self)
        rows = [self._row(example) for example in self._samples[index].tolist()]
        sample, value = _stack(rows), torch.tensor(float(self.values[index]), dtype=torch.float32)
        if self._kind == "pairs":
            return sample | {"id": _hash(rows), "margin": value}
        other = self._row_of(*self._mismatch(index))
        others = {"other_inputs": torch.from_numpy(other[0]), "other_targets": torch.from_numpy(other[1])}
        return sample | {"id": _hash([*rows, other]), "label": value} | others

    def count_inputs(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of inputs of each sample, without padding and without answers to other prompts."""
        counts: NDArray[np.int64] = self._lengths[samples]
        return counts

    def padding(self) -> dict[str, Tensor]:
        """Return a sample without a loss."""
        sample = self[0]
        names = ("targets", "other_targets")
        empty = {name: torch.full_like(sample[name], IGNORE_INDEX) for name in names if name in sample}
        return sample | empty | {"num_inputs": torch.zeros_like(sample["num_inputs"])}

    def examples_of(self, index: int) -> list[int]:
        """Return the examples of a sample."""
        found: list[int] = self._samples[index].tolist()
        return found

    def _row(self, example: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self._row_of(self._store.tokens(example), self._store.carries_loss(example))

    def _row_of(
        self, tokens: NDArray[np.int64], carries_loss: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        tokens, carries_loss = tokens[: self.seq_len + 1], carries_loss[: self.seq_len + 1]
        return tokens[:-1], np.where(carries_loss[1:], tokens[1:], IGNORE_INDEX)

    @property
    def has_other_prompts(self) -> bool:
        """Whether there is more than one prompt in the store."""
        return len(np.unique(self._store.questions)) > 1

    def _mismatch(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return tokens and loss mask of the prompt of a sample and the answer to another one.

        Which one is drawn from the index alone, so that a reference can be computed once for all epochs: from this
        split, or from the whole store where the split has hardly an answer to another prompt.
        """
        example = int(self._samples[index, 0])
        questions, rng = self._store.questions, rng_at(0, index)
        for _ in range(_MAX_DRAWS):
            other = int(self._samples[rng.integers(len(self)), 0])
            if questions[other] != questions[example]:
                break
        else:
            others = np.flatnonzero(questions != questions[example])
            other = int(others[rng.integers(len(others))])
        begins, other_begins = (int(self._store.carries_loss(each).argmax()) for each in (example, other))
        tokens = np.concatenate([self._store.tokens(example)[:begins], self._store.tokens(other)[other_begins:]])
        mask = np.concatenate([np.zeros(begins, dtype=np.bool_), self._store.carries_loss(other)[other_begins:]])
        return tokens, mask


def _hash(rows: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> Tensor:
    """Return a hash of rows of inputs and targets, [] int64: equal for equal samples, whatever holds them."""
    digest = xxhash.xxh3_64()
    for inputs, targets in rows:
        digest.update(len(inputs).to_bytes(8, "little"))
        digest.update(inputs.tobytes())
        digest.update(targets.tobytes())
    return torch.tensor(digest.intdigest() >> 1)  # 63 bits


def _stack(rows: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> dict[str, Tensor]:
    """Return rows of different lengths as `inputs` and `targets` [K, T], and `num_inputs` [K]."""
    width = max(len(inputs) for inputs, _ in rows)
    inputs = torch.zeros(len(rows), width, dtype=torch.int64)
    targets = torch.full((len(rows), width), IGNORE_INDEX)
    for row, (tokens, wanted) in enumerate(rows):
        inputs[row, : len(tokens)] = torch.from_numpy(tokens)
        targets[row, : len(wanted)] = torch.from_numpy(wanted)
    return {"inputs": inputs, "targets": targets, "num_inputs": torch.tensor([len(tokens) for tokens, _ in rows])}


def pad_samples(samples: Sequence[dict[str, Tensor]], *, seq_len: int, packs: bool = False) -> dict[str, Any]:
    """Return a batch: `inputs` and `targets` [B K, T], `num_inputs` [B K], and all else with one row per sample.

    Rows are padded at the end to a multiple of 64 tokens, or `seq_len`; attention is causal. With `packs`, `packing`
    says by the name of inputs where the model reads each of their tokens, see `recipes.data.packed_batch`.
    """
    batch: dict[str, Any] = {}
    packing: dict[str, Packing] = {}
    for name, first in samples[0].items():
        values = [sample[name] for sample in samples]
        if name in ("num_inputs",):
            batch[name] = torch.cat(values)
        elif name.endswith(("inputs", "targets")):
            rows = [row for value in values for row in (value if value.ndim == 2 else [value])]
            width = min(-(-max(len(row) for row in rows) // PAD_TO) * PAD_TO, seq_len)
            fill = IGNORE_INDEX if name.endswith("targets") else 0
            batch[name] = torch.full((len(rows), width), fill, dtype=first.dtype)
            for index, row in enumerate(rows):
                batch[name][index, : len(row)] = row
            if packs and name.endswith("inputs"):
                num_inputs = torch.cat([sample["num_inputs"] for sample in samples]).numpy()
                num_inputs = num_inputs if name == "inputs" else np.array([len(row) for row in rows])
                packing[name] = plan_packing(num_inputs, width=width, seq_len=seq_len)
        else:
            batch[name] = torch.stack(values)
    return batch | ({"packing": packing} if packs else {})


class Preferences(Conversations):
    """Preferences from rows of `path`: JSONL, JSON, CSV or Parquet files, or a hub dataset.

    Attributes:
        packs_batches: Whether the model reads several answers of a batch in one row.
    """

    target_kind: ClassVar[str] = "{kind}"

    def __init__(self, *, kind: Kind, fields: Mapping[str, str | None], packing: bool, **settings: Any) -> None:
        """Store the settings; nothing is read before `prepare`.

        Args:
            kind: What a row is: `pairs` of answers, or single `answers` with a label.
            fields: Field name in the format -> field name in this dataset, or None for a field that is not to be read.
            packing: Whether answers of a micro-batch share rows in the model, without attending to each other.
            **settings: As for `Conversations`.
        """
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
        self._reader = PreferenceReader(kind=kind, fields=fields)
        self._format = f"{kind} {sorted(fields.items(), key=str)}"
        self._kind = kind
        self.packs_batches = packing

    @property
    @override
    def collate(self) -> Callable[[Sequence[Any]], Any]:
        return functools.partial(pad_samples, seq_len=self.seq_len, packs=self.packs_batches)

    @override
    def prepare(self, tokenizer: Any = None) -> None:
        is_first = self._prepared is None
        super().prepare(tokenizer)
        stores = self._ready()[1].values()
        if is_first and self.tokenizer.chat_template and not any(store.meta.num_conversations for store in stores):
            LOGGER.warning(
                "The tokenizer has a chat template, and no row is a conversation: answers to plain text are compared."
                " For a model that chats, give prompts and answers as lists of messages"
            )
        if self._kind == "pairs":
            self._warn_of_repeated_prompts()
            return
        splits: Mapping[str, Any] = self._ready()[2]
        for split, rows in splits.items():
            typed = (
                f"data.val_path={self._val_path}" if split == "val" and self._val_path else f"data.path={self._path}"
            )
            key, noun = typed.partition("=")[0], f"all {count(len(rows), 'answer')} of the {split} split are"
            num_good = int((rows.values > 0).sum())
            if split == "train" and num_good in (0, len(rows)):
                reason = f"{noun} {'good' if num_good else 'bad'}: nothing tells them apart"
                raise ConfigError(typed, reason, f"{key}=<rows of both labels>")
            if not rows.has_other_prompts:
                reason = f"{noun} to one prompt, and KTO compares with answers to others"
                raise ConfigError(typed, reason, f"{key}=<rows of several prompts>, or recipe=dpo")

    def _warn_of_repeated_prompts(self) -> None:
        """Log if the answers of most pairs begin with their prompt, which is then read twice."""
        rows, decode = next(iter(self._ready()[2].values())), self.tokenizer.decode
        store, number = rows._store, min(len(rows), _NUM_EXAMINED)
        num_repeated = 0
        for index in range(number):
            examples = rows.examples_of(index)
            begins = [int(store.carries_loss(example).argmax()) for example in examples]
            prompt = decode(store.tokens(examples[0])[: begins[0]].tolist()).strip()
            answers = (store.tokens(each)[begin:].tolist() for each, begin in zip(examples, begins, strict=True))
            num_repeated += bool(prompt) and all(decode(answer).strip().startswith(prompt) for answer in answers)
        if 2 * num_repeated > number:
            query = ".prompt as $p | .chosen |= ltrimstr($p) | .rejected |= ltrimstr($p)"
            LOGGER.warning(
                "Both answers of %d of the first %d pairs begin with their prompt, which is then read twice."
                " If they are whole texts: %s < <these rows as JSONL> > <new file>, then its path",
                *(num_repeated, number, shell("jq -c", query)),
            )

    @property
    @override
    def noun(self) -> str:
        return self._kind.removesuffix("s")

    def rejected_answers(self, num_samples: int) -> list[tuple[list[int], list[int]]]:
        """Return prompt and rejected answer of each of `questions`, as tokens.

        None of labelled answers, and of pairs whose answers differ in several turns: the last is to another prompt.
        """
        if self._kind == "answers":
            return []
        stores = self._ready()[1]
        store = stores["val" if "val" in stores else "train"]
        found = []
        for example, prompt, _ in self._find_questions(num_samples):
            answer = store.tokens(example + 1).tolist()[len(prompt) :]  # after the chosen one
            if store.tokens(example + 1)[: len(prompt)].tolist() != prompt:
                continue
            end = self.tokenizer.find_end(answer)
            found.append((prompt, answer if end is None else answer[: answer.index(end)]))
        return found

    @override
    def describe(self) -> str:
        num_in_parts = sum(store.meta.num_in_parts for store in self._ready()[1].values())
        others = "; answers of %s have several turns, of which only those of the assistant carry loss"
        return super().describe() + (others % count(num_in_parts, "row") if num_in_parts else "")

    @override
    def describe_sample(self, sample: int) -> dict[str, Any]:
        described = super().describe_sample(sample)
        named = {document["name"]: document for document in described["documents"]}  # both answers of a row
        return described | {"documents": [*named.values()]}

    @override
    def _make_rows(self, store: ExampleStore, examples: NDArray[np.int64]) -> Any:
        return PreferenceRows(store, examples, seq_len=self.seq_len, kind=self._kind)
