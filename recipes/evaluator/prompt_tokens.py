"""Tokenize context and continuation of requests, split where lm-evaluation-harness splits them."""

from collections.abc import Iterator

from recipes.tokenizer import Tokenizer

Pair = tuple[list[int], list[int]]  # tokens of a context, and of the continuation to score


class PromptTokens:
    """Tokenizes like `transformers`: a tokenizer's first tokens are prepended, and special tokens are parsed in text.

    In training data the text of a special token is plain text; here results must be comparable with published ones.

    Args:
        tokenizer: Tokenizer of the run.
        is_rendered: Whether texts are rendered conversations, which begin as their template says, as in training.

    Attributes:
        start: Token for an empty context: beginning-of-sequence, or end-of-text if there is none.
    """

    def __init__(self, tokenizer: Tokenizer, *, is_rendered: bool = False) -> None:
        self._tokenizer = tokenizer
        self._is_rendered = is_rendered
        spelling = tokenizer.special_tokens.get("bos_token")
        ids = self._read(spelling) if spelling is not None else []
        self.start: int = ids[0] if len(ids) == 1 else tokenizer.end_of_text

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text; a rendered conversation that begins with the first token gets no other one."""
        if self._is_rendered:
            return self._read(text)
        return self._tokenizer.encode_start(text, reads_special_tokens=True)

    def split(self, context: str, continuation: str) -> Pair:
        """Return the tokens of a context, at least one, and of its continuation.

        The continuation is everything in the joint tokens after the length of the context's own. If a token spans the
        seam, the model reads the context's part and the rest is not scored: as in the harness, and rare, because
        trailing spaces of the context move to the continuation, where most vocabularies put them.
        """
        if not context.rstrip():  # empty or only white space
            tokens = self._read(context + continuation)
            if tokens[:1] == [self.start]:
                return tokens[:1], tokens[1:]
            return [self.start], tokens
        num_blanks = len(context) - len(context.rstrip())
        if num_blanks:
            context, continuation = context[:-num_blanks], context[-num_blanks:] + continuation
        tokens = self.encode(context)
        return tokens, self.encode(context + continuation)[len(tokens) :]

    def roll(self, text: str, *, window: int) -> Iterator[Pair]:
        """Yield a text in parts that cover each token once, each after as much context as fits into the window.

        The first part follows the start token, even where the tokenizer has already added one: the harness counts it.

        Args:
            text: Text of any length.
            window: Maximum number of tokens that the model reads.
        """
        tokens = [self.start, *self.encode(text)]
        for begin in range(1, len(tokens), window):
            end = min(begin + window, len(tokens))
            yield tokens[max(0, end - 1 - window) : begin], tokens[begin:end]

    def _read(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode_rendered(text).ids
        return ids
