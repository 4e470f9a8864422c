"""Text that a language model generates: samples, and answers to the questions of validation."""

import itertools
from abc import ABC
from collections.abc import Callable, Collection
from typing import Any, cast

from recipes.model import LanguageModel
from recipes.model.generate import generate, generate_batch
from recipes.task.base import TrainingTask
from recipes.tokenizer import Tokenizer

_QUESTIONS_AT_A_TIME = 32  # of a rank
_NOT_ENDED = " …"
_MORE_TOKENS = 8  # than the longest expected answer: one that is too long is wrong as soon as it is longer


class GeneratesText(TrainingTask, ABC):
    """A task whose model is a `LanguageModel`.

    Attributes:
        tokenizer: For `generate_text`; None if the data is not text.
        source: Of the data, for `recipes_answer_questions`; None without a data module.
    """

    tokenizer: Tokenizer | None = None
    source: Any = None

    def generate_text(
        self,
        prompt: str | list[int],
        num_tokens: int,
        *,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        seed: int,
        ends: Collection[int] = (),
    ) -> str | None:
        """Return the continuation of a prompt, without the prompt; None without a tokenizer. Call on every rank.

        Args:
            prompt: Text, or tokens; an empty one starts a new document.
            num_tokens: Largest number of tokens to add.
            temperature: 0: always the likeliest token; below 1: sharper; above 1: flatter.
            top_k: Sample among the k likeliest tokens; None: all.
            top_p: Sample among the fewest tokens that have this probability together; None: all.
            seed: Of the sampling.
            ends: Tokens that end it, in addition to end-of-text.
        """
        if self.tokenizer is None:
            return None
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        prompt_tokens = tokens or [self.tokenizer.end_of_text]
        with self.trainer.precision_plugin.forward_context():
            tokens = generate(
                cast(LanguageModel, self.model),
                prompt_tokens,
                num_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                ends=[self.tokenizer.end_of_text, *ends],
                agree=self.trainer.strategy.broadcast,
            )
        return self.tokenizer.decode(tokens)

    recipes_generate_text = generate_text  # for the callback that samples

    def recipes_answer_questions(
        self,
        num_questions: int,
        *,
        num_tokens: int | None,
        rank: int,
        num_ranks: int,
        all_ended: Callable[[bool], bool],
    ) -> list[tuple[str, str, str]] | None:
        """Return question, expected and given answer of this rank's share of validation questions.

        Call on every rank. The likeliest token is taken each time.

        Args:
            num_questions: Of all ranks.
            num_tokens: Largest number of tokens of an answer; None: somewhat more than the longest expected one.
            rank: Of this process.
            num_ranks: That share the questions.
            all_ended: Returns whether a flag is true on every rank.

        Returns:
            Texts; an answer that did not end ends with an ellipsis. None if the data has no questions.
        """
        if self.tokenizer is None or not hasattr(self.source, "questions"):
            return None
        questions: list[tuple[list[int], list[int]]] = self.source.questions(num_questions)
        found_ends = {self.tokenizer.find_end(answer) for _, answer in questions} - {None}
        ends = cast(set[int], found_ends | {self.tokenizer.end_of_text})
        if num_tokens is None:
            num_tokens = max((len(answer) for _, answer in questions), default=0) + _MORE_TOKENS
        found: list[tuple[str, str, str]] = []
        # the same number of batches on every rank: where weights are sharded, each forward pass is a collective
        for start in range(0, len(questions), num_ranks * _QUESTIONS_AT_A_TIME):
            batch = questions[start : start + num_ranks * _QUESTIONS_AT_A_TIME]
            mine = batch[rank::num_ranks]
            with self.trainer.precision_plugin.forward_context():
                given = generate_batch(
                    cast(LanguageModel, self.model),
                    [prompt for prompt, _ in mine] or [batch[0][0]],
                    num_tokens,
                    temperature=0.0,
                    top_k=None,
                    top_p=None,
                    seeds=range(max(1, len(mine))),
                    ends=ends,
                    all_ended=all_ended,
                )
            for (prompt, expected), answer in zip(mine, given, strict=False):
                until_end = list(itertools.takewhile(lambda token: token not in ends, expected))
                # without a token that ends it, an answer is as long as the expected one
                has_end = len(until_end) < len(expected)
                tokens = answer.tokens if has_end else answer.tokens[: len(expected)]
                texts = [self.tokenizer.decode(part) for part in (prompt, until_end, tokens)]
                if has_end and not answer.has_ended:
                    texts[2] += _NOT_ENDED
                found.append((texts[0], texts[1], texts[2]))
        return found
