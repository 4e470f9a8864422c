"""Convert rows of common instruction formats to one representation of prompt and answer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipes.errors import ConfigError

Message = dict[str, Any]

FORMATS = ("messages", "sharegpt", "prompt_completion", "alpaca", "text")
# fields of each format, by the name that data.fields may map to another one
_FIELDS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
_MESSAGE_FIELDS = {"messages": ("role", "content"), "sharegpt": ("from", "value")}
ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}


@dataclass(frozen=True, kw_only=True)
class Example:
    """One row: a conversation, or plain text.

    Attributes:
        place: File and line, for errors.
        prompt: Messages or text without loss; None: all text has a loss.
        answer: Messages or text that follow, with a loss; in messages, only those of the assistant.
        tools: Tools that a template may render.
    """

    place: str
    prompt: list[Message] | str | None
    answer: list[Message] | str
    tools: list[Any] | None = None

    @property
    def question(self) -> str:
        """Everything before the first answer to a user; rows with the same question are kept in one split."""
        if isinstance(self.answer, str):
            return str(self.answer if self.prompt is None else self.prompt)
        messages = [*(self.prompt or []), *self.answer]
        roles = [message["role"] for message in messages]
        asked = roles.index("user") if "user" in roles else 0
        first = roles.index("assistant", asked) if "assistant" in roles[asked:] else len(messages)
        return repr([(message["role"], message["content"]) for message in messages[:first]])


class Reader:
    """Turns rows into examples.

    Args:
        format: One of `FORMATS`; None: detected from the fields of each row.
        fields: Field name in the format -> field name in this dataset: `{messages: dialog, role: speaker}`.

    Raises:
        ConfigError: `fields` has a name that is in no format.
    """

    def __init__(self, *, format: str | None, fields: Mapping[str, str]) -> None:
        known = {*(name for names in _FIELDS.values() for name in names), "input", "role", "content", "from", "value"}
        unknown = sorted({*fields} - known)
        if unknown:
            reason = f"it maps the names of a format, which are {', '.join(sorted(known))}"
            raise ConfigError(f"data.fields.{unknown[0]}", reason, "data.fields={<name of the format>: <your name>}")
        self._format = format
        self._fields = dict(fields)

    def read(self, row: Mapping[str, Any], *, place: str) -> Example:
        """Return the example of a row.

        Raises:
            ConfigError: A field is missing or has the wrong type, or a role is unknown.
        """
        kind = self._format or self._recognize(row, place=place)
        values = {name: self._get(row, name, place=place) for name in _FIELDS[kind]}
        tools = _tools(row.get("tools"), place)
        if kind in _MESSAGE_FIELDS:
            [messages] = values.values()
            return Example(place=place, prompt=None, answer=self._messages(messages, kind, place), tools=tools)
        if kind == "prompt_completion":
            return self._prompt_completion(values["prompt"], values["completion"], tools, place)
        if kind == "alpaca":
            question = _text(values["instruction"], "instruction", place)
            given = row.get(self._fields.get("input", "input"))
            if given not in (None, ""):
                question = f"{question}\n\n{_text(given, 'input', place)}"
            prompt = [{"role": "user", "content": question}]
            answer = {"role": "assistant", "content": _text(values["output"], "output", place)}
            return Example(place=place, prompt=prompt, answer=[answer])
        return Example(place=place, prompt=None, answer=_text(values["text"], "text", place))

    def _recognize(self, row: Mapping[str, Any], *, place: str) -> str:
        # a format whose fields the user has mapped takes precedence over other matching formats
        for kind in sorted(FORMATS, key=lambda kind: not {*_FIELDS[kind]} & {*self._fields}):
            if all(row.get(self._fields.get(name, name)) is not None for name in _FIELDS[kind]):
                return kind
        wanted = "; ".join(" and ".join(names) for names in _FIELDS.values())
        reason = f"its fields are {', '.join(row) or 'none'}, expected {wanted}"
        raise ConfigError(place, reason, "data.fields={messages: <your name for it>}")

    def _get(self, row: Mapping[str, Any], name: str, *, place: str) -> Any:
        own = self._fields.get(name, name)
        if own not in row or row[own] is None:
            shown = ", ".join(row) or "none"
            raise ConfigError(
                place, f"it has no field {own}; its fields are {shown}", f"data.fields={{{name}: <field>}}"
            )
        return row[own]

    def _prompt_completion(self, prompt: Any, completion: Any, tools: list[Any] | None, place: str) -> Example:
        if isinstance(prompt, list) and isinstance(completion, list):
            given, answer = (self._messages(part, "messages", place) for part in (prompt, completion))
            return Example(place=place, prompt=given, answer=answer, tools=tools)
        return Example(
            place=place, prompt=_text(prompt, "prompt", place), answer=_text(completion, "completion", place)
        )

    def _messages(self, messages: Any, kind: str, place: str) -> list[Message]:
        if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
            raise ConfigError(
                place, "its messages are not a list of objects", 'a list of {"role": …, "content": …} there'
            )
        return [self._message(message, kind, place) for message in messages]

    def _message(self, message: Mapping[str, Any], kind: str, place: str) -> Message:
        role_field, content_field = (self._fields.get(name, name) for name in _MESSAGE_FIELDS[kind])
        typed = message.get(role_field)
        role = _SHAREGPT_ROLES.get(str(typed), typed) if kind == "sharegpt" else typed
        if role not in ROLES:
            reason = f"its role {role_field}={typed!r} is not one of {', '.join(ROLES)}"
            raise ConfigError(
                place, reason, f"one of these there, or data.fields={{{_MESSAGE_FIELDS[kind][0]}: <field>}}"
            )
        others = {name: value for name, value in message.items() if name not in (role_field, content_field)}
        content = message.get(content_field)
        if content is None and not others.get("tool_calls"):
            raise ConfigError(
                place, f"a message of role {role} has no {content_field}", f"a text as {content_field} there"
            )
        text = "" if content is None else _text(content, f"{content_field} of a message", place)
        kept = {key: value for key, value in others.items() if value is not None and key not in ("role", "content")}
        return kept | {"role": role, "content": text}


def _text(value: Any, name: str, place: str) -> str:
    if not isinstance(value, str):
        shown = type(value).__name__
        raise ConfigError(place, f"its {name} is not text but {shown}", f"a text as {name} there")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        reason = f"its {name} has half a character ({value[error.start]!r}, a lone surrogate)"
        raise ConfigError(place, reason, f"whole characters in {name} there") from error
    return value


def _tools(value: Any, place: str) -> list[Any] | None:
    """Return the tools of a row; many datasets store them as a JSON string within the JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value or "null")
        except ValueError as error:
            raise ConfigError(
                place, f"its tools are text that is not valid JSON ({error})", "a list as tools there"
            ) from error
    if value is not None and not isinstance(value, list):
        raise ConfigError(place, f"its tools are not a list but {type(value).__name__}", "a list as tools there")
    return value or None
