"""Generate answers to validation questions and compare them with the expected answers."""

import json
import logging
import re
from collections.abc import Callable
from typing import Annotated

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from typing_extensions import override

from .files import LineFile
from .lightning_packages import Callback
from .logged_step import completed_steps, run_folder
from .profiler_hooks import get_profiler
from .protocols import SupportsAnswers
from .ranks import all_ranks, data_rank, data_size, gather_by_samples, num_ranks

log = logging.getLogger("lightning_recipes")

_SHOWN_CHARACTERS = 60


class AnswerCheck(Callback):
    """Generates answers after each validation and logs the fraction that is correct as `val/exact_match`.

    Loss and token accuracy are teacher-forced: each token is predicted from the correct prefix. Here the model must
    generate the complete answer on its own and end it.

    Calls `recipes_answer_questions` on every rank if the module is a `SupportsAnswers`; any other module, or one that
    returns None, is not checked. The questions are split across ranks. Rank 0 appends `{"step", "question",
    "expected", "given", "score"}` to `answers.jsonl` in the run folder, and logs one wrong answer.

    Args:
        num_questions: Validation questions to answer, evenly spaced; the same ones each time.
        num_tokens: Maximum number of tokens per answer. None allows slightly more than the longest expected answer.
        pattern: Regular expression that extracts the text to compare from both answers: the first group of its last
            match, or the whole match if it has no group. An answer without a match is wrong. None compares the
            complete answers with surrounding whitespace stripped.
        score: Called as `score(given=…, expected=…)` with the text that `pattern` extracts; returns 0 to 1. None
            scores 1 if both are equal, else 0.

    Raises:
        ValueError: An argument is outside its range, or `pattern` is not a valid regular expression.

    Example:
        >>> check = AnswerCheck(num_questions=100, pattern=r"#### (-?[0-9.]+)")
        >>> check.judge("6 * 7 = 42\\n#### 42", "#### 42")
        1.0
    """

    def __init__(
        self,
        *,
        num_questions: Annotated[int, ">= 1"] = 64,
        num_tokens: Annotated[int, ">= 1"] | None = None,
        pattern: str | None = None,
        score: Callable[..., float] | None = None,
    ) -> None:
        super().__init__()
        if num_questions < 1:
            raise ValueError(f"num_questions is {num_questions}; a fraction needs 1 or more; set num_questions=64")
        if num_tokens is not None and num_tokens < 1:
            raise ValueError(f"num_tokens is {num_tokens}; an answer has 1 or more; set None for as many as expected")
        try:
            self._pattern = None if pattern is None else re.compile(pattern)
        except re.error as error:
            why = f"it is not a valid regular expression: {error}"
            raise ValueError(f"pattern is {pattern!r}; {why}; set None") from error
        self.num_questions = num_questions
        self.num_tokens = num_tokens
        self._score = score
        self._file: LineFile | None = None

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or not isinstance(pl_module, SupportsAnswers):
            return
        with get_profiler(trainer).profile("answer_check"), isolate_rng():
            own = pl_module.recipes_answer_questions(
                self.num_questions,
                num_tokens=self.num_tokens,
                rank=data_rank(trainer) if num_ranks() > 1 else 0,
                num_ranks=data_size(trainer) if num_ranks() > 1 else 1,
                all_ended=lambda ended: all_ranks(ended, pl_module.device),
            )
        answers = [answer for answers in gather_by_samples(own, trainer) for answer in answers or ()]
        if not answers:
            return
        scores = [self.judge(given, expected) for _, expected, given in answers]
        pl_module.log("val/exact_match", sum(scores) / len(scores), rank_zero_only=False, sync_dist=False)
        if trainer.is_global_zero:
            _log_answers(trainer, answers, scores)
            self._write(trainer, answers, scores)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._file is not None:
            self._file.finish()

    def _write(self, trainer: Trainer, answers: list[tuple[str, str, str]], scores: list[float]) -> None:
        folder = run_folder(trainer)
        if folder is None:
            return
        path = folder / "answers.jsonl"
        if self._file is None or self._file.path != path:
            self._file = LineFile(path)
        rows = [
            {"step": completed_steps(trainer), "question": question, "expected": expected, "given": given}
            | {"score": score}
            for (question, expected, given), score in zip(answers, scores, strict=True)
        ]
        self._file.append([json.dumps(row) for row in rows])

    def judge(self, given: str, expected: str) -> float:
        """Return the score of an answer, from 0 to 1."""
        parts = [self._extract(text) for text in (given, expected)]
        if parts[0] is None or parts[1] is None:
            return 0.0
        if self._score is not None:
            return float(self._score(given=parts[0], expected=parts[1]))
        return float(parts[0] == parts[1])

    def _extract(self, text: str) -> str | None:
        if self._pattern is None:
            return text.strip()
        matches = list(self._pattern.finditer(text))
        found = matches[-1].group(1 if self._pattern.groups else 0) if matches else None
        return None if found is None else str(found)


def _log_answers(trainer: Trainer, answers: list[tuple[str, str, str]], scores: list[float]) -> None:
    step = completed_steps(trainer)
    wrong = next((answer for answer, score in zip(answers, scores, strict=True) if score < 1.0), None)
    shown = ""
    if wrong is not None:
        question, expected, given = (
            text if len(text) <= _SHOWN_CHARACTERS else f"…{text[-_SHOWN_CHARACTERS:]}" for text in wrong
        )
        shown = f"; wrong: {question!r} -> {given!r}, expected {expected!r}"
    when = f"step {step}: " if step else ""  # a checkpoint that is only evaluated has taken no steps here
    total = float(sum(scores))
    count = f"{total:.0f}" if total.is_integer() else f"{total:.1f}"
    log.info("%s%s of %d answers are correct%s", when, count, len(scores), shown)
