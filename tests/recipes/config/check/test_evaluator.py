"""What evaluates instead of a split: who reads it, and what a folder of somebody else may not say about it."""

from pathlib import Path

import pytest

from recipes.config import compose_and_check
from recipes.config.check.origin import check_origin
from recipes.config.compose import compose_run

CHOSEN = ["mode=evaluate", "evaluator=lm_eval", "evaluator.tasks=[piqa]"]


def fixes(*overrides: str) -> dict[str, str]:
    """Return what to type, by setting."""
    _, mistakes = compose_and_check(overrides)
    return {m.setting: m.fix for m in mistakes if not m.setting.startswith("mode=evaluate")}  # needs a checkpoint


def test_a_chosen_evaluator_has_no_mistake() -> None:
    assert fixes(*CHOSEN) == {}


def test_no_other_mode_reads_it() -> None:
    assert list(fixes("evaluator=lm_eval", "evaluator.tasks=[piqa]")) == ["evaluator=lm_eval"]


def test_it_is_for_language_models() -> None:
    assert fixes(*CHOSEN, "model=resnet18", "data=digits", "tokenizer=none") == {"evaluator=lm_eval": "evaluator=none"}


@pytest.mark.parametrize(
    ("typed", "setting"),
    [
        (CHOSEN[:2], "no evaluator.tasks"),
        ([*CHOSEN[:2], "evaluator.tasks=[]"], "evaluator.tasks=[]"),
        ([*CHOSEN, "evaluator.batch_size=0"], "evaluator.batch_size=0"),
        ([*CHOSEN, "evaluator.limit=0"], "evaluator.limit=0"),
        ([*CHOSEN, "+evaluator.task=a"], "evaluator.task=a"),
    ],
)
def test_a_mistake_is_reported_once(typed: list[str], setting: str) -> None:
    assert list(fixes(*typed)) == [setting]


def test_tasks_that_a_folder_names_are_rejected_until_they_are_typed() -> None:
    typed = ["evaluator=lm_eval", "evaluator.tasks=[theirs.yaml]", "evaluator.task_folder=theirs"]
    config = compose_run(["mode=evaluate", *typed]).config
    assert [*check_origin(config, typed, Path("run/config.yaml"))] == []
    rejected = {mistake.setting for mistake in check_origin(config, typed[:1], Path("run/config.yaml"))}
    assert rejected == {
        f"{section}.{setting}"
        for section in ("evaluator", "mode.evaluator")
        for setting in ("tasks.0=theirs.yaml", "task_folder=theirs")
    }
