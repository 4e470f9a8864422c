"""Texts that end a completion."""

from collections.abc import Sequence

from recipes.tokenizer import Tokenizer


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
