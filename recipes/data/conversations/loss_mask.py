"""Tokenize examples, and find which of their tokens carry loss.

A template may mark assistant text in `{% generation %}` blocks. Most published ones do not: then each answer is found
by rendering the conversation without and with it. Whatever an example holds has to be in its text: a template that
shows no answer or no call would train the model on an empty one.
"""

import copy
import functools
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from recipes.data.conversations.chat_template import REASONING, ChatTemplate
from recipes.data.conversations.conversation import Example, Message, calls_of
from recipes.data.conversations.image_parts import MARK, TYPED, ImageTokens, split_parts
from recipes.errors import ConfigError
from recipes.tokenizer import Tokenizer

TrainOn = Literal["answers", "last_answer", "all"]
Span = tuple[int, int]  # start and end, of characters or of tokens

log = logging.getLogger("lightning_recipes")

_SHOWN_CHARACTERS = 40
_DEPENDS = "what it renders for an answer depends on what follows or on the prompt for it"
_FIX_OF_TEMPLATE = "data.chat_template=<file.jinja> with {% generation %} around answers"
_PROBE = "What is it?"
_FOUND_FIELDS = ("role", "content", "tool_calls", "tool_call_id")  # checked by what they say, or only a link


@dataclass(frozen=True)
class Tokenized:
    """One example.

    Attributes:
        tokens: [N]; none if no answer is to be learned.
        carries_loss: [N], tokens with a loss.
        is_answer: [N], tokens in answers.
        ends: Whether an answer ends with a token that stops a generation, and that token carries loss.
        hidden: What the text does not show, by name.
    """

    tokens: NDArray[np.uint32]
    carries_loss: NDArray[np.bool_]
    is_answer: NDArray[np.bool_]
    ends: bool
    hidden: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Rendered:
    """A rendered conversation: its text, tokens, their characters, and the places of marked answers in it."""

    text: str
    ids: list[int]
    offsets: list[Span]
    blocks: list[Span]

    def text_of(self, start: int, stop: int) -> str:
        """Return the text of tokens."""
        if start >= stop:
            return ""
        return self.text[self.offsets[start][0] : self.offsets[stop - 1][1]]


class _NotFoundError(ConfigError):
    """Answers that a template does not show at a place of their own."""


class ExampleTokenizer:
    """Turns examples into tokens and loss masks; picklable.

    Args:
        tokenizer: Tokenizer of the data.
        template: Chat template for conversations.
        train_on: `answers` of the assistant, the `last_answer`, or `all` tokens.
        images: Tokens of an image; None: no example has one.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, *, train_on: TrainOn, images: ImageTokens | None = None
    ) -> None:
        self._images = images
        if images is not None:
            template = _mark_places(template, tokenizer, images)
            tokenizer = tokenizer.with_mark(MARK, in_place_of=images.id)
        self._tokenizer = tokenizer
        self._template = template
        self._train_on = train_on
        self._special = tokenizer.special_ids | {tokenizer.end_of_text}
        self._ends = self._special | {*tokenizer.end_ids}

    def __call__(self, example: Example) -> Tokenized:
        """Return the tokens of one example, with all of those of its images, which carry no loss.

        Raises:
            ConfigError: The template rejects or does not show the example, or its answers cannot be located.
        """
        tokenized = self._tokenize(example)
        return tokenized if self._images is None else self._insert_images(tokenized, example, self._images)

    def _insert_images(self, tokenized: Tokenized, example: Example, images: ImageTokens) -> Tokenized:
        """Return an example with the tokens of each image in place of its mark.

        Raises:
            ConfigError: The text has not as many places as images, or a token of images as text.
        """
        is_mark = tokenized.tokens == self._tokenizer.vocab_size - 1  # [N], without those of images but one each
        num_places = int(is_mark.sum())
        if len(is_mark) and num_places != len(example.images):
            reason = f"the template of {self._template.name} shows {num_places} of its {len(example.images)} images"
            raise ConfigError(example.place, reason, self._template.suggest_other(uses_tools=False))
        if (tokenized.tokens[~is_mark] == images.id).any():
            spelled = self._tokenizer.decode([images.id])
            reason = f"its text has the token {spelled!r}, which the model takes for images"
            raise ConfigError(f"{example.place}: model.image_token_id={images.id}", reason, "an id that no text has")
        repeats = np.where(is_mark, images.length, 1)  # [N], of the same
        carries_loss = tokenized.carries_loss & ~is_mark
        return replace(
            tokenized,
            tokens=np.repeat(np.where(is_mark, np.uint32(images.id), tokenized.tokens), repeats),
            carries_loss=np.repeat(carries_loss, repeats),
            is_answer=np.repeat(tokenized.is_answer & ~is_mark, repeats),
        )

    def _tokenize(self, example: Example) -> Tokenized:
        if isinstance(example.answer, str):
            assert example.prompt is None or isinstance(example.prompt, str)
            tokens, answer = self._text(example.prompt, _divide(example.answer, example.asides))
            carries_loss = np.ones_like(answer) if self._train_on == "all" else answer
            return Tokenized(np.array(tokens, dtype=np.uint32), carries_loss, answer, ends=True)
        try:
            return self._conversation(example)
        except _NotFoundError as error:
            ways = [_FIX_OF_TEMPLATE, *self._find_ways(example)]
            raise ConfigError(f"{example.place}: {error.setting}", error.reason, ", or ".join(ways)) from error
        except ConfigError as error:
            raise ConfigError(f"{example.place}: {error.setting}", error.reason, error.fix) from error

    def _find_ways(self, example: Example) -> list[str]:
        """Return the settings with which this conversation can be learned, each of them tried."""
        found, ways = list[str](), tuple[TrainOn, ...](("last_answer", "all"))
        for way in ways:
            try:
                other = copy.copy(self)
                other._train_on = way
                tried = other._conversation(example)
                found += [f"data.train_on={way}"] if len(tried.tokens) else []
            except ConfigError as error:
                log.debug("data.train_on=%s does not help: %s", way, error.reason)
        return found

    def _text(self, prompt: str | None, parts: Sequence[tuple[str, bool]]) -> tuple[list[int], NDArray[np.bool_]]:
        """Return prompt, answer and end-of-text, after the tokens that the tokenizer puts before every text.

        Args:
            prompt: Text before the answer; None: there is none.
            parts: The answer, divided into what is learned and what is not.
        """
        encode = self._tokenizer.encode
        first = self._tokenizer.first_tokens
        text = prompt or ""
        whole = [*first, *(encode(text) if text else [])]
        is_answer = [prompt is None] * len(whole)
        for part, is_learned in parts:
            longer = [*first, *encode(f"{text}{part}")]
            if longer[: len(whole)] != whole:  # a token spans the boundary; at inference what is before stands alone
                longer = whole + encode(part)
            is_answer += [is_learned] * (len(longer) - len(whole))
            text, whole = f"{text}{part}", longer
        return [*whole, self._tokenizer.end_of_text], np.array([*is_answer, parts[-1][1]])

    def _conversation(self, example: Example) -> Tokenized:
        assert not isinstance(example.prompt, str)
        assert not isinstance(example.answer, str)
        num_given = len(example.prompt or [])
        messages = [*(example.prompt or []), *example.answer]
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= num_given]
        if self._train_on == "last_answer":
            answers = answers[-1:]
        without_loss = {*answers} & example.without_loss
        if self._train_on != "all":
            answers = [index for index in answers if index not in without_loss]
        if not messages or (self._train_on != "all" and not answers):
            nothing = np.zeros(0, dtype=np.bool_)
            return Tokenized(np.zeros(0, dtype=np.uint32), nothing, nothing, ends=False)
        mistake: ConfigError | None = None
        for given in _forms(messages):
            try:
                whole = self._render(given, example.tools)
                hidden = self._check_shown(given, {*answers} - without_loss, whole, example.tools)
                spans = self._locate(given, answers, example.tools, whole, must_find=without_loss)
                for index, found in spans.items():
                    shown = "".join(whole.text_of(start, stop) for start, stop in found)
                    if index not in without_loss and (missing := _find_missing(given[index], shown)):
                        raise self._not_shown(missing)
            except ConfigError as error:
                mistake = mistake or error
                continue
            return self._mask(whole, spans, without_loss, hidden)
        assert mistake is not None, "there is at least one form"
        raise mistake

    def _mask(
        self, whole: _Rendered, spans: dict[int, list[Span]], without_loss: set[int], hidden: tuple[str, ...]
    ) -> Tokenized:
        is_answer = np.zeros(len(whole.ids), dtype=np.bool_)
        carries_loss = np.full_like(is_answer, self._train_on == "all")
        for index, found in spans.items():
            for start, stop in found:
                is_answer[start:stop] = carries_loss[start:stop] = index not in without_loss
        if self._train_on == "all":  # also the beginning of the next turn ends an answer
            first = int(is_answer.argmax()) if is_answer.any() else 0
            ends = any(id in self._ends for id in whole.ids[first:])
        else:
            ends = any(self._ends_turn(whole.ids[start:stop]) for found in spans.values() for start, stop in found[-1:])
        return Tokenized(np.array(whole.ids, dtype=np.uint32), carries_loss, is_answer, ends, hidden)

    def _ends_turn(self, answer: Sequence[int]) -> bool:
        """Return whether the last token of an answer that is not white space stops a generation."""
        shown = (id for id in reversed(answer) if id in self._ends or self._tokenizer.decode([id]).strip())
        return next(shown, None) in self._ends

    def _locate(
        self,
        messages: list[Message],
        answers: list[int],
        tools: list[Any] | None,
        whole: _Rendered,
        *,
        must_find: set[int],
    ) -> dict[int, list[Span]]:
        """Find the tokens of answers in a rendered conversation.

        Args:
            messages: The conversation.
            answers: Indices of the messages to find; with `train_on=all` those that cannot be found are left out.
            tools: Tools of the conversation.
            whole: The rendered conversation.
            must_find: Indices of messages to find in any case.
        """
        find = self._by_blocks if self._template.marks_answers(tools) else self._by_difference
        if self._train_on != "all":
            return find(messages, answers, tools, whole)
        found: dict[int, list[Span]] = {}
        for index in answers:
            try:
                found |= find(messages, [index], tools, whole)
            except ConfigError as error:
                if index in must_find:
                    raise
                log.debug("An answer cannot be found, and need not be: %s", error.reason)
        return found

    def _by_blocks(
        self, messages: list[Message], answers: list[int], tools: list[Any] | None, whole: _Rendered
    ) -> dict[int, list[Span]]:
        """Find answers in the blocks of a template; an answer may have several, such as reasoning and text."""
        roles = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        blocks = [(start, end) for start, end in whole.blocks if start < end]
        if len(whole.blocks) == len(roles):
            blocks_of = {index: [block] for index, block in zip(roles, whole.blocks, strict=True)}
        else:
            begins = [self._find_beginning(messages[:index], tools, whole) for index in roles]
            ends = [*begins[1:], len(whole.text)]
            blocks_of = {
                index: [block for block in blocks if begin <= block[0] < end]
                for index, begin, end in zip(roles, begins, ends, strict=True)
            }
        for index in answers:
            shown = "".join(whole.text[start:end] for start, end in blocks_of[index])
            if not _is_shown(messages[index]["content"], shown) and "tool_calls" not in messages[index]:
                if not blocks_of[index]:
                    raise self._cannot_mask(f"it marks {len(blocks)} answers of {len(roles)}")
                raise self._cannot_mask(f"where it marks one there is {shown[:_SHOWN_CHARACTERS]!r}")
        offsets = whole.offsets
        return {
            index: [_find_tokens(offsets, start, end) for start, end in blocks_of[index] if start < end]
            for index in answers
        }

    def _find_beginning(self, before: list[Message], tools: list[Any] | None, whole: _Rendered) -> int:
        """Return where the text of further messages begins at the latest."""
        return _count_same(self._render(before, tools).text, whole.text) if before else 0

    def _by_difference(
        self, messages: list[Message], answers: list[int], tools: list[Any] | None, whole: _Rendered
    ) -> dict[int, list[Span]]:
        """Find answers by rendering the conversation up to each of them, without and with it."""
        found = {}
        for index in answers:
            is_last = index == len(messages) - 1
            after = whole if is_last else self._render(messages[: index + 1], tools)
            start = self._find_start(messages[: index + 1], tools, after)
            # what follows an answer may begin otherwise than a text ends: Phi-3 ends with <|endoftext|>
            stop = _count_same(after.ids, whole.ids)
            if stop < len(after.ids):
                is_shown = not _find_missing(messages[index], after.text_of(start, stop))
                if not is_shown or not self._are_special(after.ids[stop:]):
                    raise self._cannot_mask(_DEPENDS)
            found[index] = [(start, stop)]
        return found

    def _are_special(self, ids: Sequence[int]) -> bool:
        return all(id in self._special or not self._tokenizer.decode([id]).strip() for id in ids)

    def _find_start(self, messages: list[Message], tools: list[Any] | None, after: _Rendered) -> int:
        """Return the first token of the last message that is not in the prompt for it."""
        before = messages[:-1]
        if not before:
            return self._find_first_start(messages, tools, after)
        prompt = self._render(before, tools, adds_prompt=True)
        num_same = _count_same(prompt.ids, after.ids)
        if num_same == len(prompt.ids):
            return num_same
        # a prompt for reasoning, such as `<think>`, before an answer without it: what both have is given
        given = self._render(before, tools)
        if num_same > len(given.ids) and _count_same(given.ids, after.ids) == len(given.ids):
            return num_same
        raise self._cannot_mask(_DEPENDS)

    def _find_first_start(self, messages: list[Message], tools: list[Any] | None, after: _Rendered) -> int:
        """Return where an answer begins that nothing precedes: many templates cannot render a prompt for it."""
        try:
            prompt = self._render([], tools, adds_prompt=True)
        except ConfigError as error:
            log.debug("There is no prompt before the first message: %s", error.reason)
        else:
            if _count_same(prompt.ids, after.ids) == len(prompt.ids):
                return len(prompt.ids)
        # another text in its place has the same beginning
        other = "0" if not messages[0]["content"].lstrip().startswith("0") else "1"
        return _count_same(self._render([{"role": "assistant", "content": other}], tools).ids, after.ids)

    def _check_shown(
        self, messages: list[Message], learned: set[int], whole: _Rendered, tools: list[Any] | None
    ) -> tuple[str, ...]:
        """Reject a text without an answer, a call or the tools; return what else of the conversation it lacks."""
        hidden = list[str]()
        last_asked = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
        for index, message in enumerate(messages):
            role = message["role"]
            missing = _find_missing(message, whole.text) if role == "assistant" else None
            # the text of an earlier answer may be lost to what follows: then it cannot be found
            is_lost = self._train_on == "all" or index == max(learned, default=-1) or "tool_calls" in message
            if missing and index in learned and is_lost:
                raise self._not_shown(missing)
            if missing or not _is_shown(message["content"], whole.text):
                beside = " beside tool_calls" if message.get("tool_calls") and not missing else ""
                hidden.append(f"content of {role} messages{beside}")
            for field, value in message.items():
                text = value if isinstance(value, str) else ""
                is_shown = field in _FOUND_FIELDS or self._template.reads(field, tools)
                if field in REASONING:
                    # templates leave out the reasoning before an earlier question, as a model does when it answers
                    is_shown = is_shown and (index < last_asked or _is_shown(text, whole.text))
                if not is_shown and not (text and _is_shown(text, whole.text)):
                    hidden.append(f"{field} of messages")
        if tools:
            try:
                without = self._render(messages, None).text
            except ConfigError:  # it cannot do without them
                without = ""
            if without == whole.text:
                reason = f"the template of {self._template.name} shows no tools"
                fix = f"{self._template.suggest_other(uses_tools=True)}, or 'data.fields={{tools: null}}'"
                raise ConfigError("conversation", reason, fix)
        return tuple(dict.fromkeys(hidden))

    def _render(self, messages: list[Message], tools: list[Any] | None, *, adds_prompt: bool = False) -> _Rendered:
        if self.reads_parts:
            messages = [{**message, "content": split_parts(message["content"])} for message in messages]
        text, blocks = self._template.render(messages, self._tokenizer, adds_prompt=adds_prompt, tools=tools)
        encoding = self._tokenizer.encode_rendered(text)
        first = self._tokenizer.first_tokens if self._needs_beginning(text) else []
        return _Rendered(text, [*first, *encoding.ids], [(0, 0)] * len(first) + encoding.offsets, blocks)

    def _needs_beginning(self, text: str) -> bool:
        """Return whether the tokenizer puts its first tokens before a rendered conversation.

        A processor of transformers, as models with images have one, does so unless the template has written the first
        of them; a tokenizer alone does not.
        """
        if self._images is None:
            return False
        begins = self._tokenizer.special_tokens.get("bos_token")
        return begins is None or not text.startswith(begins)

    @functools.cached_property
    def reads_parts(self) -> bool:
        """Whether the template reads the parts of a message, as those of models with images do, and not its text."""
        if self._images is None:
            return False
        asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": _PROBE}]}]
        try:
            text, _ = self._template.render(asked, self._tokenizer, adds_prompt=True, tools=None)
        except ConfigError as error:
            log.debug("The template reads no parts of messages: %s", error.reason)
            return False
        return text.count(MARK) == 1 and _PROBE in text

    def _not_shown(self, missing: str) -> ConfigError:
        reason = f"the template of {self._template.name} does not show {missing}: an empty one would be learned"
        return ConfigError("conversation", reason, self._template.suggest_other(uses_tools="a call" in missing))

    def _cannot_mask(self, reason: str) -> ConfigError:
        shown = f"answers cannot be found: {reason}"
        return _NotFoundError(f"data.chat_template of {self._template.name}", shown, _FIX_OF_TEMPLATE)


class PromptTokenizer(ExampleTokenizer):
    """Turns prompts into tokens that a model answers to, each followed by its reference; picklable.

    A conversation ends with the prompt for an answer of its template. The reference and the end-of-text token after it
    are the answer; the tokenizer encodes them apart, as what is generated does not depend on them.

    Args:
        tokenizer: Tokenizer of the data.
        template: Chat template for conversations.
        images: Tokens of an image; None: no prompt has one.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, *, images: ImageTokens | None = None) -> None:
        super().__init__(tokenizer, template, train_on="answers", images=images)

    @override
    def _tokenize(self, example: Example) -> Tokenized:
        """Return the tokens of one prompt and its reference; none of a row that is left out."""
        reference = example.answer if isinstance(example.answer, str) else example.answer[-1]["content"]
        hidden: tuple[str, ...] = ()
        if example.prompt is None:
            nothing = np.zeros(0, dtype=np.bool_)
            return Tokenized(np.zeros(0, dtype=np.uint32), nothing, nothing, ends=False)
        if isinstance(example.prompt, str):
            prompt = [*self._tokenizer.first_tokens, *self._tokenizer.encode(example.prompt)]
        else:
            try:
                prompt, hidden = self._ask(example.prompt, example.tools)
            except ConfigError as error:
                raise ConfigError(f"{example.place}: {error.setting}", error.reason, error.fix) from error
        answer = [*(self._tokenizer.encode(reference) if reference else []), self._tokenizer.end_of_text]
        is_answer = np.arange(len(prompt) + len(answer)) >= len(prompt)
        return Tokenized(np.array([*prompt, *answer], dtype=np.uint32), is_answer, is_answer, ends=True, hidden=hidden)

    def _ask(self, messages: list[Message], tools: list[Any] | None) -> tuple[list[int], tuple[str, ...]]:
        """Return the tokens of a conversation up to the next answer, and what they do not show."""
        mistake: ConfigError | None = None
        for given in _forms(messages):
            try:
                prompt = self._render(given, tools, adds_prompt=True)
                return prompt.ids, self._check_shown(given, set(), prompt, tools)
            except ConfigError as error:
                mistake = mistake or error
        assert mistake is not None, "there is at least one form"
        raise mistake


def _mark_places(template: ChatTemplate, tokenizer: Tokenizer, images: ImageTokens) -> ChatTemplate:
    """Return a template that writes `MARK` for an image, in place of what it spells out."""
    added = tokenizer.added_tokens.get(str(images.id))
    spelled = {TYPED} | (set() if added is None else {added["content"]})
    sources = [template.source, template.tool_source]
    for text in sorted(spelled, key=len, reverse=True):
        sources = [None if source is None else source.replace(text, MARK) for source in sources]
    return replace(template, source=sources[0] or "", tool_source=sources[1])


def _divide(answer: str, asides: Sequence[Span]) -> list[tuple[str, bool]]:
    """Return the parts of an answer, each with whether it is learned."""
    parts, end = [], 0
    for start, stop in asides:
        parts += [(answer[end:start], True), (answer[start:stop], False)]
        end = stop
    parts.append((answer[end:], True))
    return [part for part in parts if part[0]] or [("", True)]


def _forms(messages: list[Message]) -> list[list[Message]]:
    """Return a conversation with the arguments of its calls as objects and, for other templates, as JSON text."""
    if not any(isinstance(call.get("arguments"), dict) for message in messages for call in calls_of(message)):
        return [messages]
    return [messages, [_with_text_arguments(message) for message in messages]]


def _with_text_arguments(message: Message) -> Message:
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or call
        arguments = function.get("arguments")
        changed = {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}
        calls.append({**call, "function": changed} if "function" in call else changed)
    return {**message, "tool_calls": calls} if calls else message


def _find_missing(message: Message, text: str) -> str | None:
    """Return which part of an answer a text does not show, or None."""
    for call in calls_of(message):
        arguments = call.get("arguments")
        shown = f"a call of {call['name']}"
        if call["name"] not in text:
            return shown
        if isinstance(arguments, str) and arguments not in text:
            return f"{shown} with its arguments"
        if isinstance(arguments, dict):
            names = [name for name in arguments if name.isidentifier() and name not in text]
            # Python's spelling of an object: the template expects text
            if names or (
                str(arguments) in text and str(arguments) != json.dumps(arguments, ensure_ascii=False) != "{}"
            ):
                return f"{shown} with its arguments as JSON"
    if message.get("tool_calls") or _is_shown(message["content"], text):
        return None
    return f"the answer {message['content'].strip()[:_SHOWN_CHARACTERS]!r}"


def _is_shown(content: str, text: str) -> bool:
    """Return whether a text holds the last line of a content, as it is or as JSON.

    Only the last line is compared, because templates may omit reasoning before it.
    """
    lines = content.strip().splitlines()
    if not lines:
        return True
    last = [piece.strip() for piece in lines[-1].split(MARK)]  # images may be shown before all text
    return all(piece in text or json.dumps(piece, ensure_ascii=False)[1:-1] in text for piece in last)


def _count_same(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many items two sequences have in common from the beginning."""
    if first == second[: len(first)]:
        return len(first)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _find_tokens(offsets: list[Span], start: int, end: int) -> Span:
    """Return the token range [first, stop) of the characters [start, end); one character may have several tokens."""
    inside = [index for index, (first, stop) in enumerate(offsets) if first < end and stop > start]
    return (inside[0], inside[-1] + 1) if inside else (0, 0)
