"""Mistakes in `metrics`, and in the settings that name a metric, each with its exact message."""

import pytest

from recipes.config import compose_and_check
from recipes.config.check.metrics import find_wrong_directions

F1 = "torchmetrics.classification.MulticlassF1"
OWN = "task=classification data=dataset data.train._target_=dataset_cases.Labelled data.train.kind=classes"
OWN += " data.val=${data.train} model._target_=dataset_cases."
MESSAGES = {
    "metrics=classification": (
        "metrics=classification task=language_modeling: they are computed from what task=classification predicts;"
        " type metrics=language_modeling"
    ),
    "model=resnet18 metrics=language_modeling": (
        "metrics=language_modeling task=classification: they are computed from what task=language_modeling predicts;"
        " type metrics=classification"
    ),
    "+metrics.f1._target_=" + F1: (
        f"metrics.f1._target_={F1}: {F1}: no class or function 'MulticlassF1' in torchmetrics.classification;"
        f" type +metrics.f1._target_={F1}Score"
    ),
    "+metrics.f1._target_=torchmetric.F1": (
        "metrics.f1._target_=torchmetric.F1: torchmetric: no package 'torchmetric' is installed;"
        " type +metrics.f1._target_=<a class>, as in conf/metrics/"
    ),
    f"+metrics.f1._target_={F1}Score": (
        "no metrics.f1.num_classes: MulticlassF1Score needs it; type +metrics.f1.num_classes=<value>"
    ),
    "+metrics.f1=true": "metrics.f1=true: a metric is a section with a _target_; type +metrics.f1=null",
    f"+metrics.loss._target_={F1}Score +metrics.loss.num_classes=3": (
        "metrics.loss=…: every validation computes val/loss; type another name for this metric"
    ),
    "model=resnet18 data=random_images model.num_classes=3 metrics.accuracy_top5.top_k=4": (
        "metrics.accuracy_top5.top_k=4: the model has 3 classes; type metrics.accuracy_top5=null"
    ),
    OWN + "Perceptron": (
        "model._target_=dataset_cases.Perceptron: metrics.f1 and metrics.calibration_error need the number of classes,"
        " and Perceptron has no argument num_classes; type num_classes: int = <whole number> in the __init__ of that"
        " class, or metrics=none"
    ),
    OWN + "OfComputedClasses": (
        "no model.num_classes: metrics.f1 and metrics.calibration_error need the number of classes;"
        " type model.num_classes=<whole number>"
    ),
    "model=resnet18 metrics.f1.average=maro": (
        "metrics.f1.average=maro: it takes micro or macro or weighted or none or null; type metrics.f1.average=macro"
    ),
    "checkpoint.monitor=val/acuracy model=resnet18": (
        "checkpoint.monitor=val/acuracy: validation computes val/loss val/accuracy val/accuracy_top5 val/f1"
        " val/calibration_error; type checkpoint.monitor=val/accuracy, or +metrics.…"
    ),
    "checkpoint.monitor=val_loss": (
        "checkpoint.monitor=val_loss: validation computes val/loss val/perplexity val/token_accuracy;"
        " type checkpoint.monitor=val/loss, or +metrics.…"
    ),
    "callbacks.early_stop.stopping_threshold=0.9 callbacks.early_stop.monitor=val/accuracy": (
        "callbacks.early_stop.monitor=val/accuracy: validation computes val/loss val/perplexity val/token_accuracy;"
        " type callbacks.early_stop.monitor=val/token_accuracy, or +metrics.…"
    ),
}
# a loss that logs a quantity beside itself, in the place of that of the default
TWO_COUNTS = "loss._target_=loss_cases.TwoCounts ~loss.label_smoothing ~loss.z_loss ~loss.chunk_tokens"
VALID = [
    OWN + "OfThreeClasses",
    OWN + "OfComputedClasses model.num_classes=3",
    f"{TWO_COUNTS} checkpoint.monitor=val/even_square",
    "model=resnet18 data=random_images metrics.accuracy_top5=null model.num_classes=2",
    "model=resnet18 data=random_images ~metrics.accuracy_top5 model.num_classes=2",
    "model=resnet18 metrics=none",
    "model=resnet18 checkpoint.monitor=val/f1 checkpoint.mode=max",
    f"+metrics.f1={{_target_:{F1}Score,num_classes:2048}} checkpoint.monitor=val/f1",
    "checkpoint.monitor=train/loss",  # what validation does not compute, another may
    "checkpoint.monitor=val/bleu +callbacks.mine._target_=lightning.pytorch.callbacks.Timer",  # which may log it
]


@pytest.mark.parametrize("typed", MESSAGES)
def test_a_mistake_is_reported_with_the_override_that_fixes_it(typed: str) -> None:
    _, mistakes = compose_and_check(typed.split())
    assert [str(mistake) for mistake in mistakes] == [MESSAGES[typed]]


@pytest.mark.parametrize("typed", VALID)
def test_a_choice_of_metrics_that_fits_is_valid(typed: str) -> None:
    _, mistakes = compose_and_check(typed.split())
    assert not mistakes, [str(mistake) for mistake in mistakes]


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (
            "model=resnet18 checkpoint.monitor=val/accuracy",
            ["checkpoint.mode=min takes the worst for the best"],
        ),
        ("model=resnet18 checkpoint.monitor=val/accuracy checkpoint.mode=max", []),
        ("checkpoint.mode=max", ["checkpoint.monitor=val/loss: checkpoint.mode=max takes the worst"]),
        ("checkpoint.monitor=val/accuracy checkpoint.keep_best=0", []),
        (
            "callbacks.early_stop.patience=3 callbacks.early_stop.monitor=val/mine/exact_match",
            ["a higher exact_match is better; type callbacks.early_stop.mode=max"],
        ),
        ("callbacks.early_stop.monitor=val/accuracy", []),  # off
        (f"{TWO_COUNTS} checkpoint.monitor=val/even_square", []),
        (
            f"{TWO_COUNTS} checkpoint.monitor=val/even_square checkpoint.mode=max",
            ["checkpoint.mode=max takes the worst for the best: a lower even_square is better"],
        ),
        ("checkpoint.monitor=val/calibration checkpoint.mode=max", []),  # not known
    ],
)
def test_a_metric_whose_worst_value_would_count_as_the_best_is_named(overrides: str, lines: list[str]) -> None:
    composed, _ = compose_and_check(overrides.split())
    assert composed is not None
    found = [str(mistake) for mistake in find_wrong_directions(composed.config)]
    assert len(found) == len(lines)
    assert all(line in text for line, text in zip(lines, found, strict=True))


def test_the_number_of_classes_is_the_default_in_the_signature_and_too_few_for_a_metric_leave_it_out() -> None:
    run, mistakes = compose_and_check((OWN + "OfThreeClasses").split())
    assert run is not None
    assert not mistakes
    assert run.config["metrics"]["f1"]["num_classes"] == 3
    assert run.config["metrics"]["accuracy_top5"] is None
    assert run.left_out == ["metrics.accuracy_top5 is left out: it has top_k=5, and the model has 3 classes"]
    run, _ = compose_and_check([*(OWN + "OfThreeClasses").split(), "model.num_classes=5"])
    assert run is not None
    assert run.left_out == []
    assert run.config["metrics"]["accuracy_top5"]["num_classes"] == 5
