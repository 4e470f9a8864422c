"""GenerationEval: its score by hand, its file, and that a validation without questions is left alone."""

import json
import logging
import random
from typing import Any

import pytest
import torch

from callbacks.generation_eval import GenerationEval

ANSWERS = [("1+1=", "2", "2"), ("2+2=", "4", " 4\n"), ("3+3=", "6", "7"), ("4+4=", "8", "")]


def make_student(base: type, answers: Any = ANSWERS) -> Any:
    """Make a module that answers, and uses random numbers to do so."""

    class Student(base):  # type: ignore[misc]
        calls: list[Any]

        def recipes_answer_questions(self, num_samples: int, **options: Any) -> Any:
            ended = options.pop("all_ended")
            self.calls.append((num_samples, options, ended(True), ended(False)))
            torch.rand(5)
            random.random()
            return answers

    module = Student()
    module.calls = []
    return module


def fit(trainer_of: Any, module: Any, check: GenerationEval) -> Any:
    trainer = trainer_of(callbacks=[check], limit_val_batches=1, val_check_interval=4)
    trainer.fit(module)
    return trainer


def test_the_share_of_right_answers_is_a_metric_of_each_validation(plain_module, make_trainer, tmp_path) -> None:
    module = make_student(plain_module)
    trainer = fit(make_trainer, module, GenerationEval(num_samples=4))
    assert float(trainer.callback_metrics["val/exact_match"]) == 0.5, "spaces at both ends do not count"
    options = {"max_new_tokens": None, "rank": 0, "num_ranks": 1}
    assert module.calls == [(4, options, True, False)] * 2
    rows = [json.loads(line) for line in (tmp_path / "run" / "answers.jsonl").open()]
    assert [(row["step"], row["score"]) for row in rows] == [(s, score) for s in (4, 8) for score in (1, 1, 0, 0)]
    assert rows[2] == {"step": 4, "question": "3+3=", "expected": "6", "given": "7", "score": 0.0}


def test_the_log_shows_one_wrong_answer(plain_module, make_trainer, caplog) -> None:
    with caplog.at_level(logging.INFO, "lightning_recipes"):
        fit(make_trainer, make_student(plain_module), GenerationEval(num_samples=4))
    assert "step 8: 2 of 4 answers are correct; wrong: '3+3=' -> '7', expected '6'" in caplog.text


def test_all_right_shows_none(plain_module, make_trainer, caplog) -> None:
    with caplog.at_level(logging.INFO, "lightning_recipes"):
        fit(make_trainer, make_student(plain_module, ANSWERS[:2]), GenerationEval())
    assert caplog.messages[-1] == "step 8: 2 of 2 answers are correct"


@pytest.mark.parametrize(
    ("answer_regex", "given", "expected", "score"),
    [
        (r"#### (-?\d+)", "6 * 7 = 42\n#### 42", "so #### 42", 1.0),
        (r"#### (-?\d+)", "#### 1 no, #### 42", "#### 42", 1.0),
        (r"#### (-?\d+)", "42", "#### 42", 0.0),
        (r"#### (-?\d+)", "42", "42", 0.0),
        (r"\d+", "about 42", "42 of them", 1.0),
        (r"x(\d)?", "x", "y x", 0.0),
        (None, "42 ", "42", 1.0),
        (None, "42 …", "42", 0.0),
        (None, "42.", "42", 0.0),
    ],
)
def test_a_pattern_chooses_what_is_compared(answer_regex: str | None, given: str, expected: str, score: float) -> None:
    assert GenerationEval(answer_regex=answer_regex).judge(given, expected) == score


def test_a_function_of_ones_own_scores_what_the_pattern_finds() -> None:
    def share(given: str, expected: str) -> float:
        return sum(a == b for a, b in zip(given, expected, strict=True)) / len(expected)

    assert GenerationEval(answer_regex=r"\d+", reward=share).judge("is 1234", "1224") == 0.75


def test_rewards_are_metrics_and_see_the_row_of_each_question(plain_module, make_trainer, tmp_path) -> None:
    seen: list[Any] = []

    def rewards(**given: Any) -> dict[str, list[float]]:
        seen.append(given)
        return {"reward": [float(len(text)) for text in given["completions"]], "reward/own": [1.0, 0.0, 0.0, 0.0]}

    module = make_student(plain_module)
    # of questions in another order than the answers of the ranks
    module.recipes_question_rows = lambda num_samples: [{"level": number} for number in range(num_samples)]
    module.recipes_answered = lambda: [0, 2, 1, 3]
    trainer = fit(make_trainer, module, GenerationEval(num_samples=4, rewards=rewards))
    metrics = {name: float(trainer.callback_metrics[f"val/{name}"]) for name in ("reward", "reward/own", "exact_match")}
    assert metrics == {"reward": 5 / 4, "reward/own": 0.25, "exact_match": 0.5}
    assert seen[-1] == {
        "prompts": ["1+1=", "2+2=", "3+3=", "4+4="],
        "references": ["2", "4", "6", "8"],
        "completions": ["2", " 4\n", "7", ""],
        "rows": [{"level": 0}, {"level": 2}, {"level": 1}, {"level": 3}],
    }
    last = [json.loads(line) for line in (tmp_path / "run" / "answers.jsonl").open()][-3]
    assert (last["score"], last["reward"], last["reward/own"]) == (1.0, 3.0, 0.0)


def test_the_answers_of_the_start_are_in_the_file_as_step_0_and_are_those_of_the_first_run(
    plain_module, make_trainer, tmp_path
) -> None:
    module = make_student(plain_module)
    module.recipes_rejected_answers = lambda num_samples: {"2+2=": "5"}
    trainer = fit(make_trainer, module, GenerationEval(num_samples=4, at_start=True))
    rows = [json.loads(line) for line in (tmp_path / "run" / "answers.jsonl").open()]
    assert [row["step"] for row in rows] == [0] * 4 + [4] * 4 + [8] * 4
    assert rows[1] == {"step": 0, "question": "2+2=", "expected": "4", "given": " 4\n", "rejected": "5", "score": 1.0}
    assert [row.get("rejected") for row in rows] == [None, "5", None, None] * 3
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = make_trainer(
        callbacks=[GenerationEval(num_samples=4, at_start=True)],
        limit_val_batches=1,
        val_check_interval=4,
        max_epochs=2,
    )
    again.fit(make_student(plain_module), ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    resumed = [json.loads(line)["step"] for line in (tmp_path / "run" / "answers.jsonl").open()]
    assert resumed[:12] == [0] * 4 + [4] * 4 + [8] * 4
    assert {*resumed[12:]} == {12, 16}


@pytest.mark.parametrize("answers", [None, []])
def test_a_module_without_questions_is_left_alone(answers: Any, plain_module, make_trainer, tmp_path, caplog) -> None:
    trainer = fit(make_trainer, make_student(plain_module, answers), GenerationEval())
    assert "val/exact_match" not in trainer.callback_metrics
    assert "GenerationEval is off" not in caplog.text
    fit(make_trainer, plain_module(), GenerationEval())
    assert not (tmp_path / "run" / "answers.jsonl").exists()
    assert caplog.text.count("pass it questions and answer_fn") == 1


def test_a_function_answers_for_a_module_of_any_kind(plain_module, make_trainer, tmp_path) -> None:
    states: list[Any] = []

    def answer(module: Any, question: str) -> str:
        states.append((module.training, torch.is_grad_enabled()))
        return str(eval(question.removesuffix("=")) // 3 * 3)

    check = GenerationEval(num_samples=2, questions=[(asked, right) for asked, right, _ in ANSWERS], answer_fn=answer)
    trainer = fit(make_trainer, plain_module(), check)
    assert float(trainer.callback_metrics["val/exact_match"]) == 0.5
    assert states == [(False, False)] * 4
    rows = [json.loads(line) for line in (tmp_path / "run" / "answers.jsonl").open()]
    assert [(row["question"], row["expected"], row["given"]) for row in rows[2:]] == [
        ("1+1=", "2", "0"),
        ("3+3=", "6", "6"),
    ]


def test_answering_draws_no_random_number_of_the_training(plain_module, make_trainer) -> None:
    drawn = []
    for module in (make_student(plain_module), plain_module()):
        torch.manual_seed(0)
        random.seed(0)
        fit(make_trainer, module, GenerationEval())
        drawn.append((torch.rand(()).item(), random.random()))
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_samples": 0}, "num_samples is 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"questions": [("1+1=", "2")]}, "questions is set and answer_fn is not; .* set answer_fn too"),
        ({"answer_fn": len}, "answer_fn is set and questions is not"),
        ({"answer_regex": "("}, "answer_regex is '\\('; it is not a valid regular expression"),
    ],
)
def test_arguments_out_of_range_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GenerationEval(**settings)
