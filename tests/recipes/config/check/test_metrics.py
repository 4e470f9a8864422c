"""Names of metrics are checked before the start: a wrong one would keep no best checkpoint, or end the run hours in."""

import pytest

from recipes.config.check.metrics import check_metrics
from recipes.config.compose import compose_run
from recipes.task.classification import Classification
from recipes.task.language_modeling import LanguageModeling

CONFIG = {
    "task": {"_target_": "recipes.task.language_modeling.LanguageModeling"},
    "checkpoint": {"keep_best": 1, "best_metric": "val/loss"},
    "callbacks": {"early_stop": {"patience": None, "monitor": "val/loss"}, "report": None},
}


@pytest.mark.parametrize(
    ("metric", "fix"),
    [("val_loss", "val/loss"), ("loss", "val/loss"), ("val/perplexty", "val/perplexity"), ("val/accuracy", "val/loss")],
)
def test_a_metric_that_no_validation_measures_is_rejected(metric: str, fix: str) -> None:
    best = CONFIG | {"checkpoint": {"keep_best": 1, "best_metric": metric}}
    [mistake] = check_metrics(best)
    assert (mistake.setting, mistake.reason) == (
        f"checkpoint.best_metric={metric}",
        "validation measures val/loss val/perplexity",
    )
    assert mistake.fix == f"checkpoint.best_metric={fix}"
    stop = CONFIG | {"callbacks": {"early_stop": {"patience": 3, "monitor": metric}}}
    assert [mistake.fix for mistake in check_metrics(stop)] == [f"callbacks.early_stop.monitor={fix}"]


def test_metrics_that_decide_nothing_or_belong_to_a_callback_are_not() -> None:
    assert not list(check_metrics(CONFIG))
    assert not list(check_metrics(CONFIG | {"checkpoint": {"keep_best": 0, "best_metric": "x"}}))
    assert not list(check_metrics(CONFIG | {"checkpoint": {"keep_best": 1, "best_metric": "grad/norm"}}))
    assert not list(check_metrics(compose_run([]).config))
    assert not list(check_metrics(compose_run(["model=resnet18", "checkpoint.best_metric=val/accuracy"]).config))


def test_the_declared_names_are_those_that_validation_returns() -> None:
    language, classes = object.__new__(LanguageModeling), object.__new__(Classification)
    assert tuple(language.val_metrics([6.0, 2.0])) == LanguageModeling.val_metric_names
    assert tuple(classes.val_metrics([6.0, 2.0, 1.0])) == Classification.val_metric_names
