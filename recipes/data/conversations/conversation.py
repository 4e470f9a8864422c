"""Convert rows of common instruction formats to one representation of prompt and answer.

What a row says about itself is either used, or rejected if it would change what is learned, or returned as not read.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from recipes.data.conversations.image_parts import (
    HELD_BY,
    MARK,
    PART_TYPES,
    Image,
    join_parts,
    place_images,
    read_image,
)
from recipes.data.read_rows import name_type
from recipes.errors import ConfigError, shell, type_setting

Message = dict[str, Any]

FORMATS = ("messages", "sharegpt", "prompt_completion", "alpaca", "text")
# fields of each format, by the name that data.fields may map to another one; the last one holds the answer
_FIELDS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
_MESSAGE_FIELDS = {"messages": ("role", "content"), "sharegpt": ("from", "value")}
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function": "tool",
}
# of a row or a message: 0 and false keep it from being learned, 1 and true change nothing
_WEIGHTS = ("weight", "loss_weight", "train", "training", "trainable", "loss")
_OPPOSITES = ("masked",)
_ROW_WEIGHTS = ("weight", "loss_weight", "train")
_PARTS = ("train_detail", "training_detail")  # weights of parts of a message
_TEXT_PARTS = ("text", "input_text", "output_text")  # the latter of OpenAI's Responses
_IMAGES = ("images", "image")
_MEDIA = (*_IMAGES, "videos", "video", "audios", "audio")
_PAIR = ("chosen", "rejected")
_LABELS = ("label", "kto_tag")  # false: a bad answer
_ADDED = ("input", "system", "history", "tools")  # to the messages of a row
_VARIABLES = "chat_template_kwargs"  # of TRL: for the template of this row
_OPTIONAL = (*_ADDED, _VARIABLES, *_WEIGHTS, *_OPPOSITES, *_PARTS, *_MEDIA, *_PAIR, *_LABELS)

# names of columns in other people's data, likely ones first
_QUESTIONS = ("question", "query", "prompt", "instruction", "problem", "input", "human", "user", "source", "context")
_ANSWERS = ("response", "answer", "completion", "output", "target", "solution", "reply", "assistant", "summary")
_GIVEN = ("input", "context")  # what a question is about, beside it
# of several answers to one question, beside the plurals of those above
_SEVERAL = ("candidate", "choice", "generation", "message", "sample")
_FIX = "'data.fields={prompt: <field of the question>, completion: <field of the answer>}', or rows with both"
# messages as text in the spelling of Python
_WRITTEN_BY_PYTHON = re.compile(r"\s*\[\s*\{'(role|content|from|value)'")
_QUOTED = ("true", "false", "0", "1", "yes", "no")  # a weight as text


@dataclass(frozen=True, kw_only=True)
class Example:
    """One row: a conversation, or plain text.

    Attributes:
        place: File and line, for errors.
        prompt: Messages or text without loss; None: all text has a loss.
        answer: Messages or text that follow, with a loss; in messages, only those of the assistant.
        tools: Tools that a template may render.
        without_loss: Indices of messages, of prompt and answer together, that are not to be learned.
        asides: Of an answer that is text, the spans of characters that are not to be learned, in order.
        unread: Fields of the row that were not read.
        absent: Names in `data.fields` that the row does not have.
        silenced_by: Names of the weights of 0 or false that keep a part of it from being learned.
        value: What the row says about it, such as whether it is good; NaN: nothing.
        left_out: Why the row is not to be learned; empty: it is.
        note: Text that is kept beside the tokens, for what reads more of a row than they say.
        images: In the order of the places that `MARK` has in its messages or its prompt.
    """

    place: str
    prompt: list[Message] | str | None
    answer: list[Message] | str
    tools: list[Any] | None = None
    without_loss: frozenset[int] = frozenset()
    asides: tuple[tuple[int, int], ...] = ()
    unread: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    silenced_by: tuple[str, ...] = ()
    value: float = math.nan
    left_out: str = ""
    note: str = ""
    images: tuple[Image, ...] = ()

    @property
    def question(self) -> str:
        """What is asked first: the first message of a user, or the prompt; rows of one question are kept in one split.

        Whatever is around it: the same question with other system messages or tools is not unseen. Without a user it is
        everything before the first answer.
        """
        if isinstance(self.answer, str):
            return str(self.answer if self.prompt is None else self.prompt)
        messages = [*(self.prompt or []), *self.answer]
        for message in messages:
            if message["role"] == "user":
                return str(message["content"])
        roles = [message["role"] for message in messages]
        first = roles.index("assistant") if "assistant" in roles else len(messages)
        return repr([(message["role"], message["content"]) for message in messages[:first]])


class _Read(NamedTuple):
    """Messages of a row, which are not to be learned and by which fields, their fields that were not read, and images.

    An image is None if it is the next one of those beside the messages.
    """

    messages: list[Message]
    without_loss: set[int]
    unread: list[str]
    silenced_by: list[str]
    images: list[Image | None]


class Reader:
    """Turns rows into examples.

    Args:
        format: One of `FORMATS`; None: detected from the fields of each row.
        fields: Field name in the format -> field name in this dataset, or None for a field that is not to be read:
            `{messages: dialog, role: speaker, images: null}`.
        reads_images: Whether rows may have images.
        way_to_images: What to type so that they may, for errors; empty: nothing helps.

    Raises:
        ConfigError: `fields` has a name that is in no format.
    """

    def __init__(
        self,
        *,
        format: str | None,
        fields: Mapping[str, str | None],
        reads_images: bool = False,
        way_to_images: str = "",
    ) -> None:
        formats = {name for names in (*_FIELDS.values(), *_MESSAGE_FIELDS.values()) for name in names}
        unknown = sorted({*fields} - formats - {*_OPTIONAL})
        if unknown:
            known = ", ".join(sorted(formats | {"input", "system", "history", "tools"}))
            reason = f"it maps the names of a format, which are {known}"
            raise ConfigError(f"data.fields.{unknown[0]}", reason, "data.fields={<name of the format>: <your name>}")
        for name, own in fields.items():
            if own is not None and not isinstance(own, str):
                fix = f"'data.fields={{{name}: <your name>}}', or null to leave it out"
                raise ConfigError(f"data.fields.{name}={own}", "it takes the name of a field, or null", fix)
        self._format = format
        self._fields = dict(fields)
        # names in this dataset
        ignored: set[str | None] = {name for name, own in fields.items() if own is None}
        self._read_by = {kind: ignored | {self._own(name) for name in names} for kind, names in _FIELDS.items()}
        self._read_by["alpaca"] |= {self._own("input"), self._own("history")}
        self._read_by_chats = {self._own("system"), self._own("tools")}
        self._reads_images = reads_images
        self._way_to_images = way_to_images
        if reads_images:
            for kind in {*_FIELDS} - {"text"}:
                self._read_by[kind] |= {self._own(name) for name in _IMAGES}
        self._marks = {self._own(name) or name: name for name in (*_WEIGHTS, *_OPPOSITES, *_PARTS, *_MEDIA)}
        self._ignored = ignored
        self._mapped = [own for name, own in fields.items() if name in _ADDED and own is not None]

    def read(self, row: Mapping[str, Any], *, place: str, from_table: bool = False) -> Example:
        """Return the example of a row; without an answer, one of no messages.

        Args:
            row: Its fields.
            place: File and line.
            from_table: Whether it is a row of columns. They give every object the fields of all rows, null where it
                has none, and may hold dates or bytes.

        Raises:
            ConfigError: A field is missing or has the wrong type, a role is unknown, or the row holds what is not
                learned from and changes its meaning.
        """
        if from_table:
            row = {name: as_json(value) for name, value in row.items()}
        row = self._name_question(row)
        kind = self._format or self._recognize(row, place=place)
        values = [self._get(row, name, place=place) for name in _FIELDS[kind]]
        unread = self._find_unread(row, kind)
        self._reject(row, kind, unread, place)
        weights = {name: self._value(row, name) for name in _ROW_WEIGHTS}
        silenced_by = tuple(name for name, value in weights.items() if _is_weight(value) and not value)
        if values[-1] is None or silenced_by:
            return Example(place=place, prompt=None, answer=[], unread=tuple(unread), silenced_by=silenced_by)
        if kind == "text":
            return Example(place=place, prompt=None, answer=_text(values[0], "text", place), unread=tuple(unread))
        if values[0] is None:
            reason = f"its {_FIELDS[kind][0]} is null"
            raise ConfigError(place, reason, f"a text as {_FIELDS[kind][0]} there, or a row without it")
        if kind == "prompt_completion" and not (isinstance(values[0], list) and isinstance(values[1], list)):
            prompt, completion = (_text(value, name, place) for name, value in zip(_FIELDS[kind], values, strict=True))
            given = self._images(row, place)
            (prompt,), images = place_images([prompt], [], given, first=0, place=place)
            return Example(place=place, prompt=prompt, answer=completion, unread=tuple(unread), images=images)
        return self._conversation(row, kind, values, unread, place)

    def read_all(self, row: Mapping[str, Any], *, place: str, from_table: bool) -> list[Example]:
        """Return the only example of a row; arguments as for `read`."""
        return [self.read(row, place=place, from_table=from_table)]

    def _conversation(
        self, row: Mapping[str, Any], kind: str, values: list[Any], unread: list[str], place: str
    ) -> Example:
        """Return the example of a row of messages, with what other fields of the row add to them."""
        prompt, answer = _Read([], set(), [], [], []), _Read([], set(), [], [], [])
        if kind == "alpaca":
            question = _text(values[0], "instruction", place)
            given = self._value(row, "input")
            if given not in (None, ""):
                question = f"{question}\n\n{_text(given, 'input', place)}"
            asked, earlier = {"role": "user", "content": question}, _history(self._value(row, "history"), place)
            # the answers of earlier turns are learned, too
            (answer if earlier else prompt).messages.extend([*earlier, asked])
            answer.messages.append({"role": "assistant", "content": _text(values[1], "output", place)})
        elif kind == "prompt_completion":
            prompt, answer = (self._messages(part, "messages", place) for part in values)
        else:
            answer = self._messages(values[0], kind, place)
        messages = [*prompt.messages, *answer.messages]
        without_loss = prompt.without_loss | {len(prompt.messages) + index for index in answer.without_loss}
        given_messages = prompt.messages
        if system := self._value(row, "system"):
            first = {"role": "system", "content": _text(system, "system", place)}
            if messages and messages[0]["role"] == "system" and messages[0] != first:
                fix = f"one of them there, or {self._ignore('system')}"
                raise ConfigError(place, "it has a field system and another system message", fix)
            if messages[:1] != [first]:
                given_messages = [first, *prompt.messages]
                without_loss = {index + 1 for index in without_loss}
        given_messages, answer_messages, images = self._place_images(
            given_messages, answer.messages, [*prompt.images, *answer.images], self._images(row, place), place
        )
        tools = _tools(self._value(row, "tools"), place, is_required=kind != "alpaca", wraps=kind == "sharegpt")
        if tools is None and self._value(row, "tools"):
            unread = [*unread, "tools"]
        return Example(
            place=place,
            prompt=given_messages or None,
            answer=answer_messages,
            tools=tools,
            without_loss=frozenset(without_loss),
            unread=tuple(dict.fromkeys([*unread, *prompt.unread, *answer.unread])),
            absent=tuple(own for own in self._mapped if own not in row),
            silenced_by=(*prompt.silenced_by, *answer.silenced_by),
            images=images,
        )

    def _images(self, row: Mapping[str, Any], place: str) -> list[Image]:
        """Return the images that a row has beside its texts or messages; null is none, as are objects of nulls."""
        if not self._reads_images:
            return []
        found = {name: self._value(row, name) for name in _IMAGES}
        held = {name: value for name, value in found.items() if value not in (None, "", []) and not _is_null(value)}
        if len(held) > 1:
            fix = f"one of them there, or {self._ignore('image')}"
            raise ConfigError(place, "it has a field images and another one image", fix)
        values: Any = next(iter(held.values()), [])
        if isinstance(values, str) and values.startswith("["):  # in a CSV file, whose cells are text
            values = _parse_json(values, values)
        listed = values if isinstance(values, list) else [values]
        is_there = [value is not None and not _is_null(value) for value in listed]
        if any(is_there) and not all(is_there):
            reason = "one of its images is null, and its text may speak of it"
            raise ConfigError(place, reason, f"the rows without it, or {self._ignore(*_IMAGES)}")
        return [read_image(value, place) for value in listed if any(is_there)]

    def _place_images(
        self,
        asked: list[Message],
        answered: list[Message],
        own: Sequence[Image | None],
        given: Sequence[Image],
        place: str,
    ) -> tuple[list[Message], list[Message], tuple[Image, ...]]:
        """Return both parts of a conversation with a mark for each image that has none, and the images in order."""
        if not own and not given:
            return asked, answered, ()
        messages = [*asked, *answered]
        read = [index for index, message in enumerate(messages) if message["role"] != "assistant"]
        first = next((number for number, index in enumerate(read) if messages[index]["role"] == "user"), None)
        if first is None:
            reason = "it has images, and no message of a user that they belong to"
            raise ConfigError(place, reason, f"one there, or {self._ignore(*_IMAGES)}")
        texts = [messages[index]["content"] for index in read]
        texts, images = place_images(texts, own, given, first=first, place=place)
        for index, text in zip(read, texts, strict=True):
            messages[index] = {**messages[index], "content": text}
        return messages[: len(asked)], messages[len(asked) :], images

    def _find_kind(self, row: Mapping[str, Any]) -> str | None:
        """Return the format that a row is in by its fields; None if it is in none."""
        # a format whose fields the user has mapped takes precedence over other matching formats
        kinds = sorted(FORMATS, key=lambda kind: not {*_FIELDS[kind]} & {*self._fields})
        for kind in kinds:
            if all(self._value(row, name) is not None for name in _FIELDS[kind]):
                return kind
        # a row without an answer
        return next((kind for kind in kinds if all(self._own(name) in row for name in _FIELDS[kind])), None)

    def _name_question(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a row of a question and an answer, and no text beside, with the names of a format, if none is set."""
        images = {name: row[name] for name in _IMAGES if name in row} if self._reads_images else {}
        if self._format is not None or self._fields or {*row} - {*images} != {"question", "answer"}:
            return row
        return {"prompt": row["question"], "completion": row["answer"], **images}

    def _recognize(self, row: Mapping[str, Any], *, place: str) -> str:
        if (kind := self._find_kind(row)) is not None:
            return kind
        wanted = "; ".join(" and ".join(names) for names in _FIELDS.values())
        reason = f"its fields are {_names(row)}, expected {wanted}"
        formats = {name for names in _FIELDS.values() for name in names}
        if mapped := {name: own for name, own in self._fields.items() if name in formats and own not in row}:
            shown = " and ".join(f"{own} for {name}" for name, own in mapped.items())
            reason = f"data.fields names {shown}, and its fields are {_names(row)}"
        if several := _find_several(row):
            reason += f"; its {_shorten(several)} is {name_type(row[several])}, and a row has one answer"
            raise ConfigError(place, reason, 'a row for each answer: {"prompt": …, "completion": …}')
        if all(name in row for name in _PAIR):
            one = _to_override(self._fields | {"completion": "chosen"})
            reason += "; it holds a chosen and a rejected answer"
            raise ConfigError(place, reason, f"recipe=dpo, which learns both, or {one}")
        fix = self.suggest_fields([row])
        lists = {name: value[0] for name, value in row.items() if isinstance(value, list) and value}
        plain = Reader(format=None, fields={})
        inner = [name for name, value in lists.items() if isinstance(value, Mapping) and plain.suggest_fields([value])]
        if fix is None and inner:
            reason += f"; its {_shorten(inner[0])} is a list of rows"
            query = f".[{json.dumps(inner[0], ensure_ascii=False)}][]"
            raise ConfigError(place, reason, f"{shell('jq -c', query)} < <this file> > <new file>, then its path")
        raise ConfigError(place, reason, fix or _FIX)

    def has_fields(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row has the fields of a format, by the names in `data.fields`."""
        row, kinds = self._name_question(row), FORMATS if self._format is None else (self._format,)
        return any(all(self._own(name) in row for name in _FIELDS[kind]) for kind in kinds)

    def suggest_fields(self, rows: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the mapping, as it is typed, with which the rows can be read; None if there is none."""
        if self._format is not None:
            return None
        formats = {name for names in _FIELDS.values() for name in names}
        mapped = {name: own for name, own in self._fields.items() if name in formats and own is not None}
        absent = {name for name, own in mapped.items() if any(own not in row for row in rows)}
        guesses = [guess for row in rows for guess in _guess_fields(row)]
        for fields in ({}, *guesses) if self._fields else guesses:
            kept = {name: value for name, value in self._fields.items() if name not in {*fields} | absent}
            own = {name: value for name, value in (kept | fields).items() if name != value}
            reader = Reader(format=None, fields=own, reads_images=self._reads_images)
            # in one format: rows of another one beside them would have another text around the same words
            if all(map(reader._reads_answer, rows)) and len({reader._find_kind(row) for row in rows}) == 1:
                return _to_override(own)
        return None

    def _reads_answer(self, row: Mapping[str, Any]) -> bool:
        try:
            return self._find_kind(row) is not None and bool(self.read(row, place="").answer)
        except ConfigError:
            return False

    def _map(self, name: str, found: list[str]) -> str | None:
        """Return the override that maps a field to the only one found."""
        if len(found) != 1:
            return None
        return _to_override({key: own for key, own in (self._fields | {name: found[0]}).items() if key != own})

    def _own(self, name: str) -> str | None:
        return self._fields.get(name, name)

    def _value(self, row: Mapping[str, Any], name: str) -> Any:
        own = self._own(name)
        return None if own is None else row.get(own)

    def _get(self, row: Mapping[str, Any], name: str, *, place: str) -> Any:
        own = self._own(name)
        if own is None or own not in row:
            reason = f"it has no field {name if own is None else own}; its fields are {_names(row)}"
            raise ConfigError(place, reason, self._suggest_format(row, place) or f"'data.fields={{{name}: <field>}}'")
        return row[own]

    def _suggest_format(self, row: Mapping[str, Any], place: str) -> str | None:
        """Return the format that a row is in, if it is another one than that which was typed."""
        if self._format is None:
            return None
        kind = Reader(format=None, fields=self._fields)._find_kind(row)
        return None if kind is None else f"data.format={kind}"

    def _find_unread(self, row: Mapping[str, Any], kind: str) -> list[str]:
        """Return the fields of a row that hold something and that its format does not read."""
        is_chat = kind in (*_MESSAGE_FIELDS, "alpaca") or isinstance(self._value(row, "prompt"), list)
        read = self._read_by[kind] | (self._read_by_chats if is_chat else set())
        held = [
            name for name, value in row.items() if name not in read and not (value is None or value in ("", [], {}))
        ]
        weights = {self._own(name) for name in _ROW_WEIGHTS}
        return [str(name) for name in held if not (name in weights and _is_weight(row[name]))]

    def _reject(self, row: Mapping[str, Any], kind: str, unread: list[str], place: str) -> None:
        """Reject a row whose unread fields change what is to be learned from the others."""
        left = [name for name in _OPTIONAL if self._own(name) in unread] if unread else []
        for name in left:
            value = self._value(row, name)
            if name in _ROW_WEIGHTS and isinstance(value, str) and value.strip().lower() in _QUOTED:
                raise ConfigError(place, f"its {name} is text: {json.dumps(value)}", _unquote(self._ignore(name)))
            if name in _PARTS or (name in _ROW_WEIGHTS and isinstance(value, int | float)):
                reason = f"its {name} is {_shorten(value)}, and a row is learned or not"
                raise ConfigError(place, reason, f"0 or 1 there, or {self._ignore(name)}")
            if kind == "text" and self._reads_images and name in _IMAGES:
                reason = f"it has {name} beside its text, and images are read in questions and conversations"
                fix = f'{{"prompt": "<image>", "completion": <the text>, "image": …}}, or {self._ignore(name)}'
                raise ConfigError(place, reason, fix)
            if kind == "text":
                continue  # it is whole in itself
            if name in _MEDIA:
                raise ConfigError(place, f"it has {name}, and {self._what_is_read}", self._fix_of_media(name))
            if name in _LABELS and value is False:
                reason = (
                    f"its {name} is false: it is an example of a bad answer, which would be learned like a good one"
                )
                raise ConfigError(place, reason, f"{self._ignore(name)}, which learns it, or rows of good answers")
            if name == "system":
                fields = {"instruction": self._own("prompt"), "output": self._own("completion")}
                fix = f"{_to_override(fields)}, a conversation with a system message, or {self._ignore('system')}"
                raise ConfigError(place, "its prompt is plain text, which has no place for its field system", fix)
            if name == _VARIABLES:
                fix = f"{self._ignore(name)}, or {{%- set … -%}} at the top of data.chat_template=<file.jinja>"
                raise ConfigError(place, f"its {name} is not passed to the template", fix)
            if name == "history":
                reason = f"its history is not read with the fields {' and '.join(_FIELDS[kind])}"
                raise ConfigError(place, reason, f"{self._ignore('history')}, or rows of messages with those before")
        if kind != "text" and all(name in left for name in _PAIR):
            reason = "it holds a chosen and a rejected answer, and neither would be learned"
            raise ConfigError(place, reason, f"{self._ignore(*_PAIR)}, which leaves them out, or rows with an answer")

    def _ignore(self, *names: str) -> str:
        """Return the override that leaves fields out."""
        return _to_override(self._fields | dict.fromkeys(names))

    def _messages(self, messages: Any, kind: str, place: str) -> _Read:
        if isinstance(messages, str):
            messages = _parse_json(messages, messages)
        if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
            raise ConfigError(
                place, "its messages are not a list of objects", 'a list of {"role": …, "content": …} there'
            )
        other = "sharegpt" if kind == "messages" else "messages"
        if messages and self._own(_MESSAGE_FIELDS[kind][0]) not in messages[0]:
            # the names of the other format, under this one's name of the list
            kind = other if all(self._own(name) in messages[0] for name in _MESSAGE_FIELDS[other]) else kind
        found, without_loss, unread, silenced_by = [], set(), list[str](), list[str]()
        images = list[Image | None]()
        for index, fields in enumerate(messages):
            message, own_images = self._message(fields, kind, place)
            images += own_images
            for name in [name for name in message if name in self._ignored]:
                del message[name]
            for own in self._marks.keys() & message.keys():
                name, value = self._marks[own], message.pop(own)
                if value in ([], ""):
                    continue
                if name in _MEDIA:
                    reason = f"a message has {name}, and {self._what_is_read}"
                    if self._reads_images and name in _IMAGES:
                        reason = f"a message has {name}, and images are in the parts of its content, or in the row"
                    raise ConfigError(place, reason, self._fix_of_media(name))
                if isinstance(value, str):
                    reason = f"{name} of a message is text: {_shorten(json.dumps(value))}"
                    raise ConfigError(place, reason, _unquote(self._ignore(name)))
                if not _is_weight(value):
                    reason = f"{name} of a message is {_shorten(value)}, and a message is learned or not"
                    raise ConfigError(place, reason, f"0 or 1 there, or {self._ignore(name)}")
                is_learned = bool(value) != (name in _OPPOSITES)
                if message["role"] == "assistant":
                    without_loss |= set() if is_learned else {index}
                    silenced_by += [] if is_learned else [name]
                elif is_learned:  # only answers are, or with train_on=all the whole conversation
                    unread.append(f"{name} of {message['role']} messages")
            found.append(message)
        return _Read(found, without_loss, unread, silenced_by, images)

    @property
    def _what_is_read(self) -> str:
        return "text and images are read" if self._reads_images else "only text is trained on"

    def _fix_of_media(self, name: str) -> str:
        """Return what to type for a field of images, videos or sounds that is not read."""
        way = f"{self._way_to_images}, " if name in _IMAGES and self._way_to_images else ""
        return f"{way}{self._ignore(name)}, which leaves them out, or rows of text"

    def _message(self, message: Mapping[str, Any], kind: str, place: str) -> tuple[Message, list[Image | None]]:
        role_field, content_field = (str(self._own(name)) for name in _MESSAGE_FIELDS[kind])
        typed = message.get(role_field)
        role = SHAREGPT_ROLES.get(str(typed), typed) if kind == "sharegpt" or typed == "function" else typed
        if role not in ROLES:
            known = ROLES if kind == "messages" else (*ROLES, *SHAREGPT_ROLES)
            shown = f"no {role_field}" if typed is None else f"{role_field} {_shorten(json.dumps(typed, default=str))}"
            reason = f"a message has {shown}, expected one of {', '.join(known)}"
            others = [field for field, value in message.items() if isinstance(value, str) and value in known]
            fix = f"one of these as {role_field} there"
            if kind == "messages" and str(typed) in SHAREGPT_ROLES and self._format is None:
                turn = dict(zip(_MESSAGE_FIELDS["sharegpt"], (role_field, content_field), strict=True))
                fix = _to_override({"conversations": self._own("messages")} | turn)
            raise ConfigError(place, reason, self._map(_MESSAGE_FIELDS[kind][0], others) or fix)
        others = [name for name, value in message.items() if name != role_field and isinstance(value, str)]
        rest = {name: value for name, value in message.items() if name not in (role_field, content_field)}
        content, calls = message.get(content_field), rest.pop("tool_calls", None)
        if kind == "sharegpt" and typed == "function_call":
            content, calls = None, _parse_calls(content, place)
        elif isinstance(rest.get("function_call"), Mapping):  # OpenAI's older form
            calls = [*(calls or []), {"type": "function", "function": rest.pop("function_call")}]
        calls = _tool_calls(calls, place)
        if content is None and not calls:
            reason = f"a message of role {role} has no {content_field}"
            fix = f"a text as {content_field} there"
            raise ConfigError(place, reason, self._map(_MESSAGE_FIELDS[kind][1], others) or fix)
        text, images = ("", []) if content is None else self._content(content, content_field, role, place)
        kept = {key: value for key, value in rest.items() if value is not None and key not in ("role", "content")}
        return kept | {"role": role, "content": text} | ({"tool_calls": calls} if calls else {}), images

    def _content(self, value: Any, name: str, role: str, place: str) -> tuple[str, list[Image | None]]:
        """Return the text of a message, with a mark for each image, and the images.

        Parts of type text that follow each other are one text, as templates write them one after another.
        """
        if not isinstance(value, list) or not value or not all(isinstance(part, Mapping) for part in value):
            return _text(value, name, place, owner="a message"), []
        known = (*_TEXT_PARTS, *(PART_TYPES if self._reads_images else ()))
        others = [part.get("type") for part in value if part.get("type") not in known]
        if others:
            reason = f"the {name} of a message has a part of type {others[0]}, and {self._what_is_read}"
            way = f"{self._way_to_images}, or " if others[0] in PART_TYPES and self._way_to_images else ""
            raise ConfigError(place, reason, f"{way}a text as {name} there")
        if role == "assistant" and any(part["type"] not in _TEXT_PARTS for part in value):
            reason = "an answer of the assistant has an image, and images are read, not written"
            raise ConfigError(place, reason, f"a text as {name} there")
        parts, images = list[str](), list[Image | None]()
        for part in value:
            if part["type"] in _TEXT_PARTS:
                parts.append(_text(part.get("text"), "text", place, owner="a part of a message"))
                continue
            parts.append(MARK)
            images.append(read_image(part, place) if any(part.get(key) for key in HELD_BY) else None)
        return join_parts(parts), images


def parse_messages(value: Any, place: str) -> Any:
    """Return messages that are written as JSON, as in a CSV file or a column of texts, as messages; others unchanged.

    Raises:
        ConfigError: They are written as Python shows them.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    if _WRITTEN_BY_PYTHON.match(value):
        reason = "it is text that shows messages as Python does, and would be learned as it is"
        raise ConfigError(place, reason, "the messages as JSON there, as to_json of datasets and pandas writes them")
    try:
        found = json.loads(value)
    except ValueError:
        return value  # a text in brackets
    are_messages = bool(found) and isinstance(found, list) and all(isinstance(each, Mapping) for each in found)
    return found if are_messages and all("role" in each or "from" in each for each in found) else value


def with_roles(value: Any) -> Any:
    """Return messages of ShareGPT, with `from` and `value`, as messages with `role` and `content`; others unchanged."""
    if isinstance(value, list):
        return [with_roles(message) for message in value]
    if not isinstance(value, Mapping) or value.get("from") is None or value.get("role") is not None:
        return value
    role = SHAREGPT_ROLES.get(str(value["from"]), value["from"])
    rest = {name: inner for name, inner in value.items() if name not in ("from", "value", "role", "content")}
    return {"role": role, "content": value.get("value")} | rest


def as_messages(value: Any, role: str) -> list[Message]:
    """Return a text as the only message of a role; messages unchanged."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def calls_of(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the functions that a message calls, each with `name` and, if it has any, `arguments`."""
    return [call.get("function") or call for call in message.get("tool_calls") or ()]


def _guess_fields(row: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Yield mappings of format fields to the fields of a row, the likeliest first."""
    names = [name for name in row if isinstance(name, str)]
    for name in names:
        if isinstance(row[name], list) and row[name] and isinstance(row[name][0], Mapping):
            message = row[name][0]
            texts = [field for field, value in message.items() if isinstance(value, str)]
            roles = [field for field in texts if message[field] in (*ROLES, *SHAREGPT_ROLES)]
            yield {"messages": name}
            for role in roles:
                kind, list_name = ("messages", "messages") if message[role] in ROLES else ("sharegpt", "conversations")
                for content in [field for field in texts if field != role]:
                    yield {list_name: name} | dict(zip(_MESSAGE_FIELDS[kind], (role, content), strict=True))
    texts = [name for name in names if isinstance(row[name], str)]
    others = [name for name in texts if name not in _QUESTIONS]
    pairs = [_FIELDS[kind] for kind in ("prompt_completion", "alpaca")]
    given = next((name for name in _GIVEN if name in texts and {*texts} & {*_QUESTIONS} - {*_GIVEN}), None)
    rank = {pair: sum(name in row for name in pair) for pair in pairs}
    rank[_FIELDS["alpaca"]] += given is not None  # the only format with a place for it
    for question, answer in sorted(pairs, key=lambda pair: -rank[pair]):
        questions = [question] if question in texts else [name for name in _QUESTIONS if name in texts]
        answers = [answer] if answer in texts else [name for name in _ANSWERS if name in texts]
        for asked in questions or texts:
            for answered in answers or others:
                if asked != answered and (question in texts or answer in texts or (questions and answers)):
                    found = {question: asked, answer: answered}
                    has_input = (question, answer) == _FIELDS["alpaca"] and given not in (None, asked, answered)
                    yield found | ({"input": str(given)} if has_input else {})
    if texts == others and len(texts) == 1:  # a question alone is not what is to be learned
        yield {"text": texts[0]}


def _find_several(row: Mapping[str, Any]) -> str | None:
    """Return the field of a row that holds several answers, where a text beside it may be their question."""
    single = {*_ANSWERS, *_SEVERAL}
    for name, value in row.items():
        is_several = isinstance(value, Mapping) or (isinstance(value, list) and not _is_of_messages(value))
        is_answer = str(name).lower() in single or str(name).lower().removesuffix("s") in single
        if is_several and is_answer and any(isinstance(other, str) for other in row.values()):
            return str(name)
    return None


def _is_of_messages(value: list[Any]) -> bool:
    return bool(value) and isinstance(value[0], Mapping) and len(value[0]) > 1


def _to_override(fields: Mapping[str, str | None]) -> str:
    """Return the override that maps the names of a format to those of a dataset, None to null; none for no names."""
    if not fields:
        return "the same command without data.fields"
    return type_setting("data.fields", fields)


def _unquote(ignoring: str) -> str:
    return f"true or false there, without quotes, or {ignoring}"


def _is_weight(value: Any) -> bool:
    """Return whether a value says that something is learned, or that it is not."""
    return isinstance(value, int | float) and value in (0, 1)


def _names(row: Mapping[str, Any]) -> str:
    """Return the fields of a row, for an error; a name may hold half of a surrogate pair."""
    return _shorten(", ".join(map(str, row)), 400) or "none"


def _shorten(value: Any, num_characters: int = 40) -> str:
    return str(value)[:num_characters].encode("utf-8", "backslashreplace").decode()


def _text(value: Any, name: str, place: str, *, owner: str | None = None) -> str:
    shown = f"its {name}" if owner is None else f"the {name} of {owner}"
    if not isinstance(value, str):
        verb = "has" if isinstance(value, bytes) else "is not text but"
        raise ConfigError(place, f"{shown} {verb} {name_type(value)}", f"a text as {name} there")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        reason = f"{shown} has half a character ({value[error.start]!r}, a lone surrogate)"
        raise ConfigError(place, reason, f"whole characters in {name} there") from error
    return value


def _history(value: Any, place: str) -> list[Message]:
    """Return the earlier turns of an alpaca row: pairs of question and answer."""
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        fix = '[["<question>", "<answer>"], …] there, or \'data.fields={history: null}\''
        raise ConfigError(place, "its history is not a list of pairs of question and answer", fix)
    texts = [_text(text, "history", place) for pair in value for text in pair]
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def _is_null(value: Any) -> bool:
    """Return whether an image is an object whose fields are all null, as tables hold one that is not there."""
    return isinstance(value, Mapping) and all(field is None for field in value.values())


def _parse_json(text: str, default: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return default


def _parse_calls(value: Any, place: str) -> list[Any]:
    """Return the calls of a ShareGPT turn `function_call`: JSON text of one or several."""
    found = _parse_json(value, None) if isinstance(value, str) else value
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, Mapping) and "name" in call for call in calls):
        reason = f"its function_call is no call as JSON: {_shorten(value)}"
        raise ConfigError(place, reason, '{"name": …, "arguments": {…}} there, or gpt as from, which learns it as text')
    return [{"type": "function", "function": call} for call in calls]


def _tool_calls(calls: Any, place: str) -> list[Any]:
    """Return tool calls whose arguments are objects; OpenAI gives them as JSON text, which would be encoded twice."""
    if isinstance(calls, str):
        calls = _parse_json(calls, calls)
    if not calls:
        return []
    fix = '[{"type": "function", "function": {"name": …, "arguments": {…}}}] there'
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise ConfigError(place, "its tool_calls are not a list of objects", fix)
    found = []
    for call in calls:
        function = call.get("function") or call
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ConfigError(place, f"one of its tool_calls names no function: {_shorten(dict(call))}", fix)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _parse_json(arguments, None) if arguments.strip() else {}
            if not isinstance(arguments, Mapping):
                reason = f"the arguments of its call of {function['name']} are text that is no JSON object"
                raise ConfigError(place, reason, '"arguments": {"<name>": <value>, …} there')
            function = {**function, "arguments": arguments}
        found.append({**call, "function": function} if call.get("function") else dict(function))
    return found


def _tools(value: Any, place: str, *, is_required: bool, wraps: bool) -> list[Any] | None:
    """Return the tools of a row; many datasets store them as a JSON string within the JSON.

    Args:
        value: The field.
        place: File and line.
        is_required: Whether a field that holds no tools is an error.
        wraps: Whether to give them the form that templates expect, `{"type": "function", "function": …}`.
    """
    mistake = None
    if isinstance(value, str):
        try:
            value = json.loads(value or "null")
        except (ValueError, RecursionError) as error:
            mistake = f"text that is not valid JSON ({error})"
    if not mistake and value and not isinstance(value, list):
        mistake = f"not a list but {name_type(value)}"
    if not mistake and value and not all(isinstance(tool, Mapping) for tool in value):
        mistake = "not a list of objects"
    if mistake and is_required:
        raise ConfigError(place, f"its tools are {mistake}", "a list of objects as tools there")
    if mistake or not value:
        return None
    return [{"type": "function", "function": tool} if wraps and "function" not in tool else tool for tool in value]


def as_json(value: Any) -> Any:
    """Return the value of a column without the fields that only other rows have, and as plain data."""
    if isinstance(value, Mapping):
        return {name: as_json(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [as_json(inner) for inner in value]
    if isinstance(value, bytes):  # of older writers, which do not mark text as such
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return value
    return value if isinstance(value, str | int | float | bool | None) else str(value)
