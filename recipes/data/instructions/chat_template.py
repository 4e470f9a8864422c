"""Render and tokenize examples with a chat template, and build the loss mask.

A template may mark assistant text in `{% generation %}` blocks. Most published ones do not: then each answer is found
by rendering the conversation without and with it, provided that the first text is a prefix of the second.
"""

import functools
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from recipes.data.instructions.conversation import Example, Message
from recipes.errors import ConfigError
from recipes.tokenizer import Tokenizer

TrainOn = Literal["answers", "last_answer", "all"]
Marked = tuple[list[int], list[tuple[int, int]]]  # tokens, and start and end of each answer

log = logging.getLogger("lightning_recipes")

_ANSWER = "yes"  # to find what a template puts after an answer
_FOLDER = Path(__file__).parent / "templates"
_SHOWN_CHARACTERS = 40
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Tokenized:
    """Tokens [N] of an example, and masks of those with a loss and those in answers, [N] bool each."""

    tokens: NDArray[np.uint32]
    carries_loss: NDArray[np.bool_]
    is_answer: NDArray[np.bool_]


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template in the format of Hugging Face tokenizers, rendered in their sandbox.

    Attributes:
        source: Source of the template.
        name: Name in errors: a file, `chatml`, or the tokenizer.
    """

    source: str
    name: str

    @property
    def marks_answers(self) -> bool:
        """Whether the template marks assistant text."""
        return _GENERATION.search(self.source) is not None

    def render(
        self, messages: list[Message], tokenizer: Tokenizer, *, adds_prompt: bool, tools: list[Any] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and the characters [start, end) of each answer if they are marked.

        Raises:
            ConfigError: The template rejects the conversation, or transformers is not installed.
        """
        try:
            from jinja2 import TemplateError
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError as error:
            reason = "chat templates need the package transformers, which is not installed"
            raise ConfigError("data=instructions", reason, "pip install -e '.[huggingface]'") from error
        try:
            [text], spans = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self.source,
                return_assistant_tokens_mask=self.marks_answers,
                add_generation_prompt=adds_prompt,
                **tokenizer.special_tokens,
            )
        except (
            TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            reason = f"the template of {self.name} rejects it: {str(error).strip() or type(error).__name__}"
            raise ConfigError("conversation", reason, "data.template=chatml, or =<file.jinja>") from error
        return text, [(start, end) for start, end in (spans[0] if spans else [])]


def find_template(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    """Return a chat template.

    Args:
        name: `auto` for the template of the tokenizer, or `chatml` if it has none; `chatml`; or a file.
        tokenizer: Tokenizer of the data.

    Raises:
        ConfigError: The file does not exist.
    """
    if name == "auto" and tokenizer.chat_template is not None:
        return ChatTemplate(tokenizer.chat_template, "the tokenizer")
    if name in ("auto", "chatml"):
        return ChatTemplate((_FOLDER / "chatml.jinja").read_text(encoding="utf-8").rstrip("\n"), "chatml")
    path = Path(name).expanduser()
    if not path.is_file():
        fix = "data.template=<file.jinja>, =auto for that of the tokenizer, or =chatml"
        raise ConfigError(f"data.template={name}", "there is no such file", fix)
    return ChatTemplate(path.read_text(encoding="utf-8"), str(path))


def prompt_for_answer(message: str, tokenizer: Tokenizer) -> tuple[list[int], int | None]:
    """Return the prompt tokens for an answer to a user message, and the stop token of the answer, if any.

    A rendered conversation has the beginning-of-text token where its template says so, and nowhere else.

    Args:
        message: User message.
        tokenizer: Tokenizer with the chat template that the model was trained with.

    Raises:
        ConfigError: The template rejects the conversation.
    """
    asked = [{"role": "user", "content": message}]
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
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
    text, _ = find_template("auto", tokenizer).render(messages, tokenizer, adds_prompt=False, tools=None)
    if _ANSWER not in text:
        return []
    stop = text.rindex(_ANSWER) + len(_ANSWER)
    encoding = tokenizer.encode_rendered(text)
    special = tokenizer.special_ids | {tokenizer.end_of_text}
    places = zip(encoding.ids, encoding.offsets, strict=True)
    return [id for id, (start, _) in places if start >= stop and id in special]


def trains_on_end(tokenizer: Tokenizer, template: ChatTemplate, *, train_on: TrainOn) -> bool:
    """Return whether the loss covers a token after the text of an answer, from which a model learns to end its turn.

    It does not if the template ends a turn outside of its `{% generation %}` block, or only begins the next one, as
    that of GLM-4 does. A template that rejects the example counts as one that covers it.
    """
    asked, answered = {"role": "user", "content": "Is it so?"}, {"role": "assistant", "content": "It is so."}
    example = Example(place="", prompt=None, answer=[asked, answered, asked, answered])
    try:
        tokenized = ExampleTokenizer(tokenizer, template, train_on=train_on)(example)
    except ConfigError:
        return True
    trained = tokenized.tokens[tokenized.carries_loss].tolist()
    return bool(trained) and trained[-1] != tokenizer.encode(answered["content"])[-1]


class ExampleTokenizer:
    """Turns examples into tokens and loss masks; picklable.

    Args:
        tokenizer: Tokenizer of the data.
        template: Chat template for conversations.
        train_on: `answers` of the assistant, the `last_answer`, or `all` tokens.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, *, train_on: TrainOn) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._train_on = train_on

    def __call__(self, example: Example) -> Tokenized:
        """Return the tokens of one example.

        Raises:
            ConfigError: The template rejects the example, or its answers cannot be located.
        """
        if isinstance(example.answer, str):
            assert example.prompt is None or isinstance(example.prompt, str)
            tokens, spans = self._text(example.prompt, example.answer)
        else:
            assert not isinstance(example.prompt, str)
            try:
                tokens, spans = self._conversation(example.prompt or [], example.answer, example.tools)
            except ConfigError as error:
                raise ConfigError(f"{example.place}: {error.setting}", error.reason, error.fix) from error
        is_answer = np.zeros(len(tokens), dtype=np.bool_)
        for start, stop in spans:
            is_answer[start:stop] = True
        carries_loss = np.ones_like(is_answer) if self._train_on == "all" else is_answer
        return Tokenized(np.array(tokens, dtype=np.uint32), carries_loss, is_answer)

    def _text(self, prompt: str | None, answer: str) -> Marked:
        """Return prompt, answer and end-of-text, after the tokens that the tokenizer puts before every text."""
        encode = self._tokenizer.encode
        first = self._tokenizer.first_tokens
        given = [*first, *(encode(prompt) if prompt else [])]
        whole = [*first, *encode(f"{prompt or ''}{answer}")]
        if whole[: len(given)] != given:  # a token spans the boundary, but at inference the prompt is tokenized alone
            whole = given + encode(answer)
        whole.append(self._tokenizer.end_of_text)
        return whole, [(0 if prompt is None else len(given), len(whole))]

    def _conversation(self, prompt: list[Message], answer: list[Message], tools: list[Any] | None) -> Marked:
        messages = [*prompt, *answer]
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= len(prompt)]
        if self._train_on == "last_answer":
            answers = answers[-1:]
        if self._template.marks_answers:
            return self._by_blocks(messages, answers, tools)
        return self._by_difference(messages, answers, tools)

    def _by_blocks(self, messages: list[Message], answers: list[int], tools: list[Any] | None) -> Marked:
        text, spans = self._template.render(messages, self._tokenizer, adds_prompt=False, tools=tools)
        encoding = self._tokenizer.encode_rendered(text)
        roles = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if self._train_on == "last_answer":
            roles, spans = roles[-1:], spans[-1:]
        if self._train_on == "all" and len(spans) != len(roles):
            return list(encoding.ids), []
        if len(spans) != len(roles):
            raise self._cannot_mask(f"it marks {len(spans)} answers of {len(roles)}")
        marked = []
        for index, (start, end) in zip(roles, spans, strict=True):
            if not _is_shown(messages[index], text[start:end]):
                raise self._cannot_mask(f"where it marks one there is {text[start:end][:_SHOWN_CHARACTERS]!r}")
            if index in answers and start < end:
                marked.append(_find_tokens(encoding.offsets, start, end))
        return list(encoding.ids), marked

    def _by_difference(self, messages: list[Message], answers: list[int], tools: list[Any] | None) -> Marked:
        whole = self._ids(messages, adds_prompt=False, tools=tools)
        marked = []
        for index in answers:
            try:
                before = self._ids(messages[:index], adds_prompt=True, tools=tools)
                after = self._ids(messages[: index + 1], adds_prompt=False, tools=tools)
                if after[: len(before)] != before or whole[: len(after)] != after:
                    raise self._cannot_mask(
                        "what it renders for an answer depends on what follows or on the prompt for it"
                    )
            except ConfigError:
                if self._train_on != "all":  # with "all", the location of answers does not matter
                    raise
                continue
            marked.append((len(before), len(after)))
        return whole, marked

    def _ids(self, messages: list[Message], *, adds_prompt: bool, tools: list[Any] | None) -> list[int]:
        text, _ = self._template.render(messages, self._tokenizer, adds_prompt=adds_prompt, tools=tools)
        ids: list[int] = self._tokenizer.encode_rendered(text).ids
        return ids

    def _cannot_mask(self, reason: str) -> ConfigError:
        fix = "data.template=<file.jinja> with {% generation %} around answers, or data.train_on=last_answer or all"
        return ConfigError(f"data.template of {self._template.name}", f"answers cannot be found: {reason}", fix)


def _is_shown(message: Message, span: str) -> bool:
    """Return whether a block holds the assistant's text; inside a macro, its offsets are wrong.

    Only the last line is compared, because templates may omit reasoning before it.
    """
    lines = message["content"].strip().splitlines()
    return not lines or lines[-1].strip() in span


def _find_tokens(offsets: list[tuple[int, int]], start: int, end: int) -> tuple[int, int]:
    """Return the token range [first, stop) of the characters [start, end); one character may have several tokens."""
    inside = [index for index, (first, stop) in enumerate(offsets) if first < end and stop > start]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)
