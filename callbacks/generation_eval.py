"""Generate answers to validation questions and compare them with the expected answers."""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, ClassVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from typing_extensions import override

from .files import LineFile
from .lightning_packages import Callback
from .logged_step import completed_steps, run_folder
from .profiler_hooks import get_profiler
from .protocols import SupportsAnswers, SupportsAnswerTokens, SupportsQuestionRows, SupportsRejectedAnswers
from .ranks import all_ranks, data_rank, data_size, gather_by_samples, gather_objects, num_ranks
from .sample_text import inference_state

log = logging.getLogger("lightning_recipes")

_SHOWN_CHARACTERS = 60


class GenerationEval(Callback):
    """Generates answers after each validation and logs the fraction that is correct as `val/exact_match`.

    Loss and token accuracy are teacher-forced: each token is predicted from the correct prefix. Here the model must
    generate the complete answer on its own and end it.

    With `answer_fn`, every rank answers every one of `questions` (a sharded model needs all ranks), and the answers of
    rank 0 count. Otherwise calls `recipes_answer_questions` on every rank if the module is a `SupportsAnswers`, with
    the questions split across ranks; one line says so if there is neither. A module that returns None is not checked.
    Rank 0 appends `{"step", "question", "expected", "given", "score"}` to `answers.jsonl` in the run folder, with the
    scores of `rewards` by name, and the `rejected` answer of a
    `SupportsRejectedAnswers`, and logs one wrong answer.

    Args:
        num_samples: Number of questions to answer, evenly spaced; the same ones each time.
        max_new_tokens: Maximum number of tokens per answer. None allows slightly more than the longest expected answer.
        answer_regex: Regular expression that extracts the text to compare from both answers: the first group of its
            last match, or the whole match if it has no group. An answer without a match is wrong. None compares the
            complete answers with surrounding whitespace stripped.
        reward: Called as `reward(given=…, expected=…)` with the text that `answer_regex` extracts; returns 0 to 1. None
            scores 1 if both are equal, else 0.
        rewards: Called on rank 0 as `rewards(prompts=…, completions=…, references=…, rows=…)` with a list each; returns
            lists of scores by name, whose means are logged as `val/<name>`. An unfinished answer ends with an ellipsis.
            Rows are those of a `SupportsQuestionRows`, else empty. With an attribute `reads_tokens` that is true, it
            is also given `tokens`, those of a `SupportsAnswerTokens`.
        questions: Questions with their expected answers, for `answer_fn`.
        answer_fn: Called as `answer_fn(module, question)` in eval mode, without gradients; returns the complete answer.
            With a model of transformers, it decodes what `module.model.generate` returns.
        at_start: Whether to answer before the first optimizer step, too, into `answers.jsonl` alone, as step 0: what
            the model answered before it was trained. A resumed run keeps those of its beginning.

    Raises:
        ValueError: An argument is outside its range, `answer_regex` is not a valid regular expression, or only one of
            `questions` and `answer_fn` is set.

    Example:
        >>> check = GenerationEval(num_samples=100, answer_regex=r"#### (-?[0-9.]+)")
        >>> check.judge("6 * 7 = 42\\n#### 42", "#### 42")
        1.0
    """

    validation_metrics: ClassVar[tuple[str, ...]] = ("exact_match",)

    def __init__(
        self,
        *,
        num_samples: Annotated[int, ">= 1"] = 64,
        max_new_tokens: Annotated[int, ">= 1"] | None = None,
        answer_regex: str | None = None,
        reward: Callable[..., float] | None = None,
        rewards: Callable[..., Mapping[str, Sequence[float]]] | None = None,
        questions: Sequence[tuple[str, str]] | None = None,
        answer_fn: Callable[[LightningModule, str], str] | None = None,
        at_start: bool = False,
    ) -> None:
        super().__init__()
        if num_samples < 1:
            raise ValueError(f"num_samples is {num_samples}; a fraction needs 1 or more; set num_samples=64")
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens is {max_new_tokens}; an answer has 1 or more; set None for as many as expected"
            )
        try:
            self._answer_regex = None if answer_regex is None else re.compile(answer_regex)
        except re.error as error:
            why = f"it is not a valid regular expression: {error}"
            raise ValueError(f"answer_regex is {answer_regex!r}; {why}; set None") from error
        if (questions is None) != (answer_fn is None):
            given, other = ("questions", "answer_fn") if answer_fn is None else ("answer_fn", "questions")
            raise ValueError(f"{given} is set and {other} is not; answers need both; set {other} too")
        self.num_samples = num_samples
        self.max_new_tokens = max_new_tokens
        self._reward = reward
        self._rewards = rewards
        self._questions = [] if questions is None else _spread(questions, num_samples)
        self._answer_fn = answer_fn
        self._at_start = at_start
        self._file: LineFile | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._answer_fn is None and not isinstance(pl_module, SupportsAnswers) and trainer.is_global_zero:
            name = type(pl_module).__name__
            log.warning(
                f"GenerationEval is off: {name} has no recipes_answer_questions; pass it questions and answer_fn"
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._at_start and not completed_steps(trainer):
            with inference_state(pl_module):
                self._check(trainer, pl_module, when="before the first step")

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        step = completed_steps(trainer)  # a checkpoint that is only evaluated has taken no steps here
        for name, values in self._check(trainer, pl_module, when=f"step {step}" if step else "").items():
            pl_module.log(f"val/{name}", sum(values) / len(values), rank_zero_only=False, sync_dist=False)

    def _check(self, trainer: Trainer, pl_module: LightningModule, *, when: str) -> dict[str, list[float]]:
        """Answer the questions, write the answers and return their scores by name, equal on every rank."""
        with get_profiler(trainer).profile("generation_eval"), isolate_rng():
            answers = self._get_answers(trainer, pl_module)
        if not answers:
            return {}
        scores = [self.judge(given, expected) for _, expected, given in answers]
        rewards = self._get_rewards(trainer, pl_module, answers)
        if trainer.is_global_zero:
            _log_answers(answers, scores, when=when)
            self._write(trainer, pl_module, answers, {"score": scores} | rewards)
        return {"exact_match": scores} | rewards

    def _get_answers(self, trainer: Trainer, pl_module: LightningModule) -> list[tuple[str, str, str]]:
        """Return (question, expected answer, given answer), the same on every rank."""
        if self._answer_fn is not None:
            own = [(asked, expected, self._answer_fn(pl_module, asked)) for asked, expected in self._questions]
            return gather_objects(own)[0]
        if not isinstance(pl_module, SupportsAnswers):
            return []
        of_rank = pl_module.recipes_answer_questions(
            self.num_samples,
            max_new_tokens=self.max_new_tokens,
            rank=data_rank(trainer) if num_ranks() > 1 else 0,
            num_ranks=data_size(trainer) if num_ranks() > 1 else 1,
            all_ended=lambda ended: all_ranks(ended, pl_module.device),
        )
        return [answer for answers in gather_by_samples(of_rank, trainer) for answer in answers or ()]

    def _get_rewards(
        self, trainer: Trainer, pl_module: LightningModule, answers: Sequence[tuple[str, str, str]]
    ) -> dict[str, list[float]]:
        """Return the scores of the answers by name, of rank 0: a function need not return the same twice."""
        if self._rewards is None:
            return {}
        own: dict[str, list[float]] = {}
        further: dict[str, list[list[int]]] = {}
        numbers: list[int] = []
        if isinstance(pl_module, SupportsQuestionRows):
            of_ranks = gather_by_samples(pl_module.recipes_answered(), trainer)
            numbers = [number for each in of_ranks for number in each]
        if getattr(self._rewards, "reads_tokens", False) and isinstance(pl_module, SupportsAnswerTokens):
            of_rank = pl_module.recipes_answer_tokens()
            further["tokens"] = [tokens for each in gather_by_samples(of_rank, trainer) for tokens in each]
        if trainer.is_global_zero:
            rows: Sequence[Mapping[str, object]] = [{} for _ in answers]
            if isinstance(pl_module, SupportsQuestionRows):
                known = pl_module.recipes_question_rows(self.num_samples)
                rows = [known[number] for number in numbers] if known else rows
            found = self._rewards(
                prompts=[question for question, _, _ in answers],
                completions=[given for _, _, given in answers],
                references=[expected for _, expected, _ in answers],
                rows=rows,
                **further,
            )
            own = {name: list(values) for name, values in found.items()}
        return gather_objects(own)[0]

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._file is not None:
            self._file.finish()

    def _write(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        answers: list[tuple[str, str, str]],
        scores: Mapping[str, Sequence[float]],
    ) -> None:
        folder = run_folder(trainer)
        if folder is None:
            return
        path = folder / "answers.jsonl"
        if self._file is None or self._file.path != path:
            self._file = LineFile(path)
        rejected: Mapping[str, str] = {}
        if isinstance(pl_module, SupportsRejectedAnswers):
            rejected = pl_module.recipes_rejected_answers(self.num_samples)
        rows = [
            {"step": completed_steps(trainer), "question": question, "expected": expected, "given": given}
            | ({"rejected": rejected[question]} if question in rejected else {})
            | {name: values[index] for name, values in scores.items()}
            for index, (question, expected, given) in enumerate(answers)
        ]
        self._file.append([json.dumps(row) for row in rows])

    def judge(self, given: str, expected: str) -> float:
        """Return the score of an answer, from 0 to 1."""
        parts = [self._extract(text) for text in (given, expected)]
        if parts[0] is None or parts[1] is None:
            return 0.0
        if self._reward is not None:
            return float(self._reward(given=parts[0], expected=parts[1]))
        return float(parts[0] == parts[1])

    def _extract(self, text: str) -> str | None:
        if self._answer_regex is None:
            return text.strip()
        matches = list(self._answer_regex.finditer(text))
        found = matches[-1].group(1 if self._answer_regex.groups else 0) if matches else None
        return None if found is None else str(found)


def _spread(questions: Sequence[tuple[str, str]], count: int) -> list[tuple[str, str]]:
    """Return at most `count` questions, evenly spaced."""
    count = min(count, len(questions))
    return [questions[index * len(questions) // count] for index in range(count)]


def _log_answers(answers: list[tuple[str, str, str]], scores: list[float], *, when: str) -> None:
    wrong = next((answer for answer, score in zip(answers, scores, strict=True) if score < 1.0), None)
    shown = ""
    if wrong is not None:
        question, expected, given = (
            text if len(text) <= _SHOWN_CHARACTERS else f"…{text[-_SHOWN_CHARACTERS:]}" for text in wrong
        )
        shown = f"; wrong: {question!r} -> {given!r}, expected {expected!r}"
    total = float(sum(scores))
    count = f"{total:.0f}" if total.is_integer() else f"{total:.1f}"
    log.info("%s%s of %d answers are correct%s", f"{when}: " if when else "", count, len(scores), shown)
