"""Find and render the chat template of a tokenizer or a file, and find the tokens that end a turn of it."""

import datetime
import difflib
import functools
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.data.conversations.bounded_template import render
from recipes.data.conversations.conversation import Message
from recipes.data.found_files import describe_missing
from recipes.errors import ConfigError, type_extra, type_setting
from recipes.foreign_file import describe_error, reading
from recipes.tokenizer import Tokenizer

log = logging.getLogger("lightning_recipes")

# What `strftime_now` of a template gives in training data: with the date of the day, the same rows would give other
# tokens tomorrow. It is the date to which the template of Llama 3.2 falls back.
TRAINING_DAY = datetime.date(2024, 7, 26)
TOOL_TEMPLATE = "tool_use"  # the name of the template that transformers takes for conversations with tools

_ANSWER = "yes"  # to find what a template puts after an answer
_FOLDER = Path(__file__).parent / "templates"
_MAX_BYTES = 1024 * 1024  # of a file; published templates have at most 30 KB
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
REASONING = ("reasoning_content", "thinking", "reasoning")
_OWN_FILE = "data.chat_template=<file.jinja>"


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template in the format of Hugging Face tokenizers, rendered in their sandbox.

    Attributes:
        source: Source of the template.
        name: Name in errors: a file, `chatml`, or the tokenizer.
        tool_source: Source for conversations with tools; None: the same.
        day: Date that a template may write; None: today, as in transformers.
    """

    source: str
    name: str
    tool_source: str | None = None
    day: datetime.date | None = None

    def source_for(self, tools: list[Any] | None) -> str:
        """Return the template of a conversation with or without tools."""
        return self.source if tools is None or self.tool_source is None else self.tool_source

    def marks_answers(self, tools: list[Any] | None) -> bool:
        """Return whether the template marks assistant text."""
        return _GENERATION.search(self.source_for(tools)) is not None

    @property
    def writes_date(self) -> bool:
        """Whether a text may depend on the day on which it is rendered."""
        return "strftime_now" in f"{self.source}{self.tool_source}"

    def reads(self, field: str, tools: list[Any] | None) -> bool:
        """Return whether the template names a field of messages, or one that means the same."""
        source = self.source_for(tools)
        return any(name in source for name in (REASONING if field in REASONING else (field,)))

    def render(
        self, messages: list[Message], tokenizer: Tokenizer, *, adds_prompt: bool, tools: list[Any] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and the characters [start, end) of each answer if they are marked.

        Raises:
            ConfigError: The template rejects the conversation or exceeds a bound, or transformers is not installed.
        """
        variables: dict[str, Any] = dict(tokenizer.special_tokens)
        if self.day is not None:
            variables["strftime_now"] = self.day.strftime
        variables |= {
            "messages": [_with_names_of_reasoning(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": adds_prompt,
        }
        num_characters = len(str(messages)) + len(str(tools))
        try:
            return render(self.source_for(tools), variables, num_input_characters=num_characters)
        except ImportError as error:
            reason = "chat templates need the package transformers, which is not installed"
            raise ConfigError("data=conversations", reason, type_extra("huggingface")) from error
        except Exception as error:  # a template is a program: it raises what it likes
            uses_tools = bool(tools) or any(message.get("tool_calls") for message in messages)
            raise self._explain(error, uses_tools=uses_tools) from error

    def _explain(self, error: Exception, *, uses_tools: bool) -> ConfigError:
        line = getattr(error, "lineno", None) if type(error).__name__ == "TemplateSyntaxError" else None
        shown = str(error).strip() if "jinja2" in type(error).__module__ else describe_error(error)
        if "no loader for this environment" in shown:  # what jinja2 says of a template beside others
            reason = f"the template of {self.name} includes, imports or extends another file, and is read alone"
            return ConfigError("conversation", reason, "data.chat_template=<file.jinja that is complete by itself>")
        if line is not None:
            reason = f"the template of {self.name} is no valid Jinja: {shown}, in line {line}"
        else:
            reason = f"the template of {self.name} rejects it: {shown or type(error).__name__}"
        return ConfigError("conversation", reason, self.suggest_other(uses_tools=uses_tools))

    def suggest_other(self, *, uses_tools: bool) -> str:
        """Return what to type for another template, which takes conversations that this one does not."""
        if uses_tools:
            return f"{_OWN_FILE} of a model that calls tools"
        return _OWN_FILE if self.name == "chatml" else f"data.chat_template=chatml, or {_OWN_FILE}"


def _with_names_of_reasoning(message: Message) -> Message:
    """Return a message whose reasoning has every name that templates know, as transformers renders it."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def find_template(name: str, tokenizer: Tokenizer, *, day: datetime.date | None = None) -> ChatTemplate:
    """Return a chat template.

    Args:
        name: `auto` for the template of the tokenizer, or `chatml` if it has none; `chatml`; the name of one of
            several templates of the tokenizer; or a file.
        tokenizer: Tokenizer of the data.
        day: Date that the template may write; None: today.

    Raises:
        ConfigError: The file does not exist or is no template, or the tokenizer has several and none is the default.
    """
    named = tokenizer.chat_templates
    if name == "auto" and named:
        if "default" not in named:
            reason = f"the tokenizer has the templates {', '.join(named)}, and none of them is the default"
            raise ConfigError("data.chat_template=auto", reason, type_setting("data.chat_template", next(iter(named))))
        return ChatTemplate(named["default"], "the tokenizer", named.get(TOOL_TEMPLATE), day)
    if name in ("auto", "chatml"):
        source = (_FOLDER / "chatml.jinja").read_text(encoding="utf-8").rstrip("\n")
        return ChatTemplate(source, "chatml", day=day)
    if name in named:
        return ChatTemplate(named[name], f"the tokenizer ({name})", day=day)
    return ChatTemplate(_read_file(name, [*named]), name, day=day)


def _read_file(name: str, named: Sequence[str]) -> str:
    path, setting = Path(os.path.expanduser(name)), f"data.chat_template={name}"
    fix = f"{_OWN_FILE}, data.chat_template=auto for that of the tokenizer, or data.chat_template=chatml"
    with reading(path, setting, fix):
        if not path.is_file() and len(named) > 1:
            reason = f"there is no such file, and the templates of the tokenizer are {', '.join(named)}"
            closest = difflib.get_close_matches(name, named, n=1, cutoff=0.0)[0]
            raise ConfigError(setting, reason, f"{type_setting('data.chat_template', closest)}, or {_OWN_FILE}")
        if not path.is_file():
            raise ConfigError(setting, describe_missing(path), fix)
        num_bytes = path.stat().st_size
        if num_bytes > _MAX_BYTES:
            raise ConfigError(setting, f"it has {num_bytes:,} bytes, and no chat template is that long", fix)
        text = path.read_text(encoding="utf-8-sig")
        if "{{" not in text and "{%" not in text:
            reason = "it is empty" if not text.strip() else "it has no {{ … }}: it is no chat template"
            raise ConfigError(setting, reason, fix)
        if text.lstrip().startswith('{"'):
            raise ConfigError(setting, "it is JSON, which may hold a template but is none", fix)
    return text


def prompt_for_answer(messages: str | Sequence[Message], tokenizer: Tokenizer) -> tuple[list[int], int | None]:
    """Return the prompt tokens for the answer to a conversation, and the stop token of the answer, if any.

    A rendered conversation has the beginning-of-text token where its template says so, and nowhere else.

    Args:
        messages: Messages, of which the user's is the last; or this one alone.
        tokenizer: Tokenizer with the chat template that the model was trained with.

    Raises:
        ConfigError: The template rejects the conversation.
    """
    asked = [{"role": "user", "content": messages}] if isinstance(messages, str) else [*messages]
    text, _ = find_template("auto", tokenizer).render(asked, tokenizer, adds_prompt=True, tools=None)
    return tokenizer.encode_rendered(text).ids, next(iter(_find_ends_of_turn(tokenizer)), None)


@functools.lru_cache(maxsize=4)  # rendering takes milliseconds, and the first time a second
def find_stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return every token that ends a generated text: those of the tokenizer, and the end of a turn of its template.

    Sampling, the check of answers, evaluators and exports all stop at these.
    """
    ends = tokenizer.end_ids
    if tokenizer.chat_template is not None:
        try:
            ends = [*ends, *_find_ends_of_turn(tokenizer)]
        except ConfigError as error:
            log.info("The end of a turn is unknown: %s; %s", error.setting, error.reason)
    return tuple(dict.fromkeys(ends))


def _find_ends_of_turn(tokenizer: Tokenizer) -> list[int]:
    """Return the special tokens that the template puts after an answer."""
    template, text = find_template("auto", tokenizer), ""
    for form in (lambda text: text, _as_part):  # templates of models with images show parts alone
        messages = [{"role": "user", "content": form("?")}, {"role": "assistant", "content": form(_ANSWER)}]
        text, _ = template.render(messages, tokenizer, adds_prompt=False, tools=None)
        if _ANSWER in text:
            break
    if _ANSWER not in text:
        return []
    stop = text.rindex(_ANSWER) + len(_ANSWER)
    encoding = tokenizer.encode_rendered(text)
    special = tokenizer.special_ids | {tokenizer.end_of_text}
    places = zip(encoding.ids, encoding.offsets, strict=True)
    return [id for id, (start, _) in places if start >= stop and id in special]


def _as_part(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]
