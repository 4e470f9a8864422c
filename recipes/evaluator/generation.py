"""Generation settings and stop strings of lm-evaluation-harness tasks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.errors import ConfigError
from recipes.tokenizer import Tokenizer

_NUM_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # in order of precedence
_DEFAULT_NUM_TOKENS = 256  # the harness's default


@dataclass(frozen=True)
class Generation:
    """Generation settings of a request, hashable.

    Attributes:
        until: Stop strings, which are not part of the answer.
        num_tokens: Maximum number of tokens to generate.
        temperature: 0 always picks the most likely token.
        top_k: Sample from this many tokens; None samples from all.
        top_p: Sample from tokens with this total probability; None samples from all.
    """

    until: tuple[str, ...]
    num_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> "Generation":
        """Read the `generation_kwargs` of a task.

        Raises:
            ConfigError: A setting has no counterpart here.
        """
        rest = dict(settings)
        until = rest.pop("until", None) or []
        lengths = [rest.pop(name, None) for name in _NUM_TOKENS]
        num_tokens = next((int(length) for length in lengths if length is not None), _DEFAULT_NUM_TOKENS)
        samples = rest.pop("do_sample", None)
        temperature = float(rest.pop("temperature", 1.0 if samples else 0.0))
        top_k, top_p = rest.pop("top_k", None), rest.pop("top_p", None)
        if rest:
            name, value = next(iter(rest.items()))
            raise ConfigError(
                f"generation_kwargs.{name}={value}",
                "the task asks for it, and it has no counterpart here",
                f"a task whose YAML sets no {name}",
            )
        return cls(
            until=(until,) if isinstance(until, str) else tuple(until),
            num_tokens=num_tokens,
            temperature=0.0 if samples is False else temperature,
            top_k=int(top_k) if top_k else None,  # 0 means all, as in transformers
            top_p=None if top_p is None else float(top_p),
        )


class StopStrings:
    """Detects the end of an answer.

    Args:
        until: Stop strings.
        tokenizer: Tokenizer of the answer.
    """

    def __init__(self, until: Sequence[str], tokenizer: Tokenizer) -> None:
        self._until = [*filter(None, until), tokenizer.decode([tokenizer.end_of_text])]
        self._tokenizer = tokenizer
        self._special = tokenizer.special_ids
        # a token has at least one byte, and a character may begin before the newest tokens
        self._num_last = max(len(text.encode()) for text in self._until) + 2
        self._before = tokenizer.encode("a")  # stands for the prompt: a text before it keeps the first blank

    def is_reached(self, tokens: Sequence[int]) -> bool:
        """Return whether the newest tokens complete a stop string, which may be the text of a special token."""
        newest = self._tokenizer.decode_continuation(self._before, tokens[-self._num_last :])
        return any(text in newest for text in self._until)

    def cut(self, tokens: Sequence[int], *, prompt: Sequence[int] = ()) -> str:
        """Return the text that an answer adds to its prompt, up to the first stop string, without special tokens."""
        plain = [token for token in tokens if token not in self._special]
        answer = self._tokenizer.decode_continuation(prompt, plain)
        for text in self._until:
            answer = answer.split(text)[0]
        return answer
