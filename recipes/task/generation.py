"""Text generation during training: samples, and answers to validation questions."""

import itertools
from abc import ABC
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import numpy as np
from torch import Tensor

from recipes.data.conversations.chat_template import find_stop_ids
from recipes.data.conversations.image_parts import ImageTokens
from recipes.engine import get_engine
from recipes.generation import Completion, Sampling, StopStrings, generate
from recipes.model import LanguageModel
from recipes.task.base import TrainingTask
from recipes.tokenizer import Tokenizer

_ROWS_AT_A_TIME = 32  # per rank
_NOT_ENDED = " …"
_MORE_TOKENS = 8  # beyond the longest expected answer: a longer answer is wrong anyway


class GeneratesText(TrainingTask, ABC):
    """A task whose model is a `LanguageModel`.

    Attributes:
        tokenizer: Tokenizer for `generate_text`; None if the data is not text.
        source: Data source for `recipes_answer_questions`; None without a data module.
    """

    tokenizer: Tokenizer | None = None
    source: Any = None
    _answer_tokens: Sequence[list[int]] = ()  # of the newest answers of this rank, each after its question
    _answered: Sequence[int] = ()  # the numbers of these questions

    def generate_texts(
        self,
        prompt: str | list[int],
        max_new_tokens: int,
        *,
        sampling: Sampling,
        seeds: Sequence[int],
        images: Tensor | None = None,
        stop: Sequence[str] = (),
        on_tokens: Callable[[Sequence[int]], None] = lambda _: None,
    ) -> list[str] | None:
        """Return continuations of a prompt, without the prompt; None without a tokenizer. Call on every rank.

        Args:
            prompt: Text, in which special tokens are recognized, or tokens; an empty prompt starts a new document.
            max_new_tokens: Maximum number of tokens to generate.
            sampling: How tokens are drawn.
            seeds: Sampling seed of each continuation.
            images: [N, C, S, S], those of the tokens of the prompt. A continuation then ends where the window of the
                model does, which slides otherwise. None: there are none.
            stop: Texts that end a continuation, which are not part of it.
            on_tokens: Called with the tokens of a continuation after each of them.
        """
        if self.tokenizer is None:
            return None
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode_start(prompt, reads_special_tokens=True)
        prompt_tokens = prompt or [self.tokenizer.end_of_text]
        ending = StopStrings(stop, self.tokenizer) if stop else None
        texts = []

        def is_complete(tokens: Sequence[int]) -> bool:
            on_tokens(tokens)
            return ending is not None and ending.is_reached(tokens)

        engine = get_engine(self.trainer)
        with self.trainer.precision_plugin.forward_context(), engine.gather_for_generation() as is_independent:
            for start in range(0, len(seeds), _ROWS_AT_A_TIME):
                of_batch = seeds[start : start + _ROWS_AT_A_TIME]
                completions = generate(
                    cast(LanguageModel, self.model),
                    [prompt_tokens],
                    max_new_tokens,
                    sampling=sampling,
                    seeds=of_batch,
                    num_samples=len(of_batch),
                    images=None if images is None else [images],
                    ends=find_stop_ids(self.tokenizer),
                    is_complete=is_complete,
                    slides=images is None,
                    agree=None if is_independent else engine.share_first,
                )
                for completion in completions:
                    if ending is None:
                        texts.append(self.tokenizer.decode_continuation(prompt_tokens, completion.tokens))
                    else:
                        texts.append(ending.cut(completion.tokens, prompt=prompt_tokens))
        return texts

    def generate_text(
        self,
        prompt: str | list[int],
        max_new_tokens: int,
        *,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        seed: int,
    ) -> str | None:
        """Return one continuation of a prompt; arguments as for `generate_texts` and `Sampling`."""
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        texts = self.generate_texts(prompt, max_new_tokens, sampling=sampling, seeds=[seed])
        return None if texts is None else texts[0]

    recipes_generate_text = generate_text  # for the sampling callback

    def recipes_answer_questions(
        self,
        num_samples: int,
        *,
        max_new_tokens: int | None,
        rank: int,
        num_ranks: int,
        all_ended: Callable[[bool], bool],
    ) -> list[tuple[str, str, str]] | None:
        """Return question, expected answer and generated answer for this rank's slice of the validation questions.

        Call on every rank. Decoding is greedy.

        Args:
            num_samples: Number of questions over all ranks.
            max_new_tokens: Maximum number of tokens per answer; None: slightly more than the longest expected answer.
            rank: Index of this process.
            num_ranks: Number of ranks that share the questions.
            all_ended: Returns whether a flag is true on every rank.

        Returns:
            Texts; an unfinished answer ends with an ellipsis, and an image in a question is `<image>`. None if the data
            has no questions.
        """
        if self.tokenizer is None or not hasattr(self.source, "questions"):
            return None
        questions: list[tuple[list[int], list[int]]] = self.source.questions(num_samples)
        images: Sequence[Tensor] | None = None
        if self.reads_images and any(self.model.image_token_id in prompt for prompt, _ in questions):
            images = self.source.question_images(num_samples)
        found_ends = {self.tokenizer.find_end(answer) for _, answer in questions} - {None}
        ends = cast(set[int], found_ends | {*find_stop_ids(self.tokenizer)})
        if max_new_tokens is None:
            max_new_tokens = max((len(answer) for _, answer in questions), default=0) + _MORE_TOKENS
        found: list[tuple[str, str, str]] = []
        tokens: list[list[int]] = []
        answered: list[int] = []
        engine = get_engine(self.trainer)
        with self.trainer.precision_plugin.forward_context(), engine.gather_for_generation() as is_independent:
            # the same number of batches on every rank: each forward pass may be a collective
            for start in range(0, len(questions), num_ranks * _ROWS_AT_A_TIME):
                numbers = [*range(start, min(start + num_ranks * _ROWS_AT_A_TIME, len(questions)))][rank::num_ranks]
                mine = [questions[number] for number in numbers]
                asked = numbers or [start]
                given = generate(
                    cast(LanguageModel, self.model),
                    [questions[number][0] for number in asked],
                    max_new_tokens,
                    sampling=Sampling(temperature=0.0),
                    seeds=range(len(asked)),
                    images=None if images is None else [images[number] for number in asked],
                    ends=ends,
                    all_ended=None if is_independent else all_ended,
                )
                found += [
                    self._compare(prompt, expected, answer, ends)
                    for (prompt, expected), answer in zip(mine, given, strict=False)
                ]
                tokens += [[*prompt, *list_tokens(answer)] for (prompt, _), answer in zip(mine, given, strict=False)]
                answered += numbers
        self._answer_tokens, self._answered = tokens, answered
        return found

    def recipes_answer_tokens(self) -> Sequence[list[int]]:
        """Return the tokens of each question with its answer, as `recipes_answer_questions` gave them last."""
        return self._answer_tokens

    def recipes_answered(self) -> Sequence[int]:
        """Return the numbers of the questions that this rank answered last, in the order of its answers."""
        return self._answered

    @property
    def reads_images(self) -> bool:
        """Whether its model reads images among tokens."""
        return "reads_images" in self.supports

    def _spell(self, prompt: list[int]) -> str:
        """Return the text of a question, with `<image>` once for each image."""
        assert self.tokenizer is not None, "without one nothing is generated"
        if not self.reads_images:
            return self.tokenizer.decode(prompt)
        model: Any = self.model
        tokens = ImageTokens(model.image_token_id, model.image_seq_length)
        return tokens.spell(np.array(prompt), self.tokenizer.decode)

    def _compare(
        self, prompt: list[int], expected: list[int], answer: Completion, ends: Collection[int]
    ) -> tuple[str, str, str]:
        """Return the texts of a question, its expected answer and the generated one."""
        assert self.tokenizer is not None, "without one nothing is generated"
        until_end = list(itertools.takewhile(lambda token: token not in ends, expected))
        # if the expected answer has no stop token, compare answers of the same length
        has_end = len(until_end) < len(expected)
        tokens = answer.tokens if has_end else answer.tokens[: len(expected)]
        given_text = self.tokenizer.decode_continuation(prompt, tokens)
        if has_end and not answer.has_ended:
            given_text += _NOT_ENDED
        expected_text = self.tokenizer.decode_continuation(prompt, until_end)
        return self._spell(prompt), expected_text, given_text

    def recipes_question_rows(self, num_samples: int) -> Sequence[Mapping[str, Any]]:
        """Return the row of data of each of these validation questions; none where the data has no rows.

        Args:
            num_samples: Number of questions, as for `recipes_answer_questions`.
        """
        if self.tokenizer is None or not hasattr(self.source, "question_rows"):
            return []
        rows: list[Mapping[str, Any]] = self.source.question_rows(num_samples)
        return rows

    def recipes_rejected_answers(self, num_samples: int) -> dict[str, str]:
        """Return the rejected answer to each of these validation questions, by its text; none without preferences.

        Args:
            num_samples: Number of questions, as for `recipes_answer_questions`.
        """
        if self.tokenizer is None or not hasattr(self.source, "rejected_answers"):
            return {}
        decode, decode_after = self.tokenizer.decode, self.tokenizer.decode_continuation
        found: list[tuple[list[int], list[int]]] = self.source.rejected_answers(num_samples)
        return {decode(prompt): decode_after(prompt, answer) for prompt, answer in found}


def list_tokens(completion: Completion) -> list[int]:
    """Return the tokens of a completion, with the one that ends it if there is one."""
    return [*completion.tokens, *([] if completion.stop_token is None else [completion.stop_token])]
