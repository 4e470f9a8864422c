"""Validation metrics against torchmetrics on the real samples alone, and the traps that they avoid."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from support import TINY, composed_config, read_metrics, resolved
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)
from torchmetrics.text import BLEUScore

from recipes.build import build
from recipes.errors import ConfigError
from recipes.loss import Term
from recipes.loss.cross_entropy import CrossEntropy
from recipes.metrics import MeanLoss, Perplexity, ValidationMetrics, check_metric
from recipes.numerics.loss import IGNORE_INDEX, cross_entropy_sum

CLASSES = 10


def make_metrics() -> dict[str, Metric]:
    return {
        "accuracy": MulticlassAccuracy(CLASSES, average="micro"),
        "accuracy_top5": MulticlassAccuracy(CLASSES, top_k=5, average="micro"),
        "f1": MulticlassF1Score(CLASSES, average="macro"),
        "calibration_error": MulticlassCalibrationError(CLASSES),
    }


def make_batch(num_samples: int, *, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_samples, CLASSES, generator=generator)  # [B, V]
    return logits, torch.randint(CLASSES, (num_samples,), generator=generator)


def update(validation: ValidationMetrics, logits: Tensor, targets: Tensor) -> None:
    batch = {"targets": targets}
    validation.update(CrossEntropy()(logits, batch), outputs=logits, batch=batch)


def evaluate(metrics: dict[str, Metric], batches: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    validation = ValidationMetrics(metrics, loss=CrossEntropy())
    validation.reset()
    for logits, targets in batches:
        update(validation, logits, targets)
    return validation.compute()


def test_targets_without_loss_count_in_no_metric() -> None:
    batches = [make_batch(8, seed=0), make_batch(8, seed=1), make_batch(3, seed=2)]
    batches[1][1][::3] = IGNORE_INDEX
    batches[2][1][:] = IGNORE_INDEX  # a rank's last batch may be padding alone
    found = evaluate(make_metrics(), batches)
    logits = torch.cat([logits for logits, _ in batches])
    targets = torch.cat([targets for _, targets in batches])
    logits, targets = logits[targets != IGNORE_INDEX], targets[targets != IGNORE_INDEX]
    assert len(targets) == 8 + 5
    for name, metric in make_metrics().items():
        assert found[f"val/{name}"] == float(metric(logits, targets)), name
    assert found["val/loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-6)
    assert found["val/accuracy"] == pytest.approx((logits.argmax(1) == targets).double().mean().item(), rel=1e-7)


def test_a_second_validation_begins_from_nothing() -> None:
    validation = ValidationMetrics(make_metrics(), loss=CrossEntropy())
    results = []
    for _ in range(2):
        validation.reset()
        logits, targets = make_batch(8, seed=0)
        update(validation, logits, targets)
        results.append(validation.compute())
    assert results[0] == results[1]


def all_right_then_all_third() -> list[tuple[Tensor, Tensor]]:
    """Return a batch whose targets have the largest logit, and one whose targets have the third largest."""
    (logits, _), (more, _) = make_batch(8, seed=0), make_batch(8, seed=1)
    return [(logits, logits.argmax(1)), (more, more.argsort(1, descending=True)[:, 2])]


def test_metrics_that_agree_in_the_first_batch_stay_different_metrics() -> None:
    names = {f"top{k}": MulticlassAccuracy(CLASSES, top_k=k, average="micro") for k in (2, 5)}
    found = evaluate(dict(names), all_right_then_all_third())
    assert (found["val/top2"], found["val/top5"]) == (0.5, 1.0)


def test_upstream_compute_groups_still_merge_metrics_that_agree_by_chance() -> None:
    """torchmetrics 1.9: fails when it is fixed; then `compute_groups=False` can go."""
    top = {f"top{k}": MulticlassAccuracy(CLASSES, top_k=k, average="micro") for k in (2, 5)}
    collection = MetricCollection(dict(top))
    for logits, targets in all_right_then_all_third():
        collection.update(logits, targets)
    assert float(collection.compute()["top5"]) == 0.5  # that of top2; 1.0 is right


def test_logits_between_zero_and_one_are_not_taken_for_probabilities() -> None:
    logits = torch.rand(64, CLASSES, generator=torch.Generator().manual_seed(0))  # [N, V], as of a head near zero
    targets = torch.arange(64) % CLASSES
    found = evaluate({"calibration_error": MulticlassCalibrationError(CLASSES)}, [(logits, targets)])
    right = float(MulticlassCalibrationError(CLASSES)(logits.softmax(1), targets))
    assert found["val/calibration_error"] == pytest.approx(right, rel=1e-6)
    assert float(MulticlassCalibrationError(CLASSES)(logits, targets)) > 5 * right  # confidences of 0.9 instead of 0.15


def test_the_tokens_of_a_batch_are_its_samples() -> None:
    logits = torch.randn(2, 5, CLASSES, generator=torch.Generator().manual_seed(0))  # [B, T, V]
    targets = logits.argmax(-1)
    targets[0, :3] = (targets[0, :3] + 1) % CLASSES
    targets[1, 2:] = IGNORE_INDEX
    found = evaluate({"token_accuracy": MulticlassAccuracy(CLASSES, average="micro")}, [(logits, targets)])
    assert found["val/token_accuracy"] == pytest.approx(4 / 7, rel=1e-7)


def test_perplexity_is_that_of_the_loss_and_finite_for_a_broken_model() -> None:
    metric = Perplexity()
    metric.update(torch.tensor(30.0), torch.tensor(12))
    assert float(metric.compute()) == pytest.approx(math.exp(2.5), rel=1e-15)
    metric.update(torch.tensor(1e30), torch.tensor(1))
    assert float(metric.compute()) == pytest.approx(math.exp(700.0), rel=1e-12)


def test_upstream_perplexity_is_still_infinite_for_one_token_that_came_as_a_surprise() -> None:
    """torchmetrics 1.9: fails when it is fixed; its memory and time then decide between the two."""
    logits = torch.tensor([[120.0, 0.0], [120.0, 0.0]])  # [N, V]
    targets = torch.tensor([0, 1])
    upstream, ours = torchmetrics.text.Perplexity(), Perplexity()
    upstream.update(logits[None], targets[None])
    ours.update(cross_entropy_sum(logits, targets), torch.tensor(2))
    assert float(upstream.compute()) == math.inf
    assert float(ours.compute()) == pytest.approx(math.exp(60.0), rel=1e-6)


def test_the_sum_of_many_losses_loses_no_digit() -> None:
    metric = MeanLoss()
    for _ in range(1000):
        metric.update(torch.tensor(1e6 + 1.0), torch.tensor(1))
    assert float(metric.compute()) == 1_000_001.0  # near 1e9 a float32 is a multiple of 64


def test_a_metric_is_no_part_of_the_task_that_engines_wrap_cast_and_save(tmp_path: Path) -> None:
    run = build(resolved(composed_config("model=resnet18"), tmp_path))
    assert not list(run.task.modules())[1:]
    assert not run.task.state_dict()
    run.task.bfloat16()
    run.task.to(torch.bfloat16)
    validation = run.task.val_metrics
    logits, targets = make_batch(8, seed=0)
    update(validation, logits, targets)
    assert validation._metrics["val/loss"].loss_sum.dtype == torch.float64
    assert validation.compute()["val/loss"] == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-6)


@pytest.mark.parametrize(
    ("metric", "reason"),
    [
        (torch.nn.Linear(1, 1), "it is not a torchmetrics.Metric"),
        (BLEUScore(), "it rejects logits [N, 10] and classes [N]: "),
        (MulticlassAccuracy(3), "it rejects logits [N, 10] and classes [N]: "),
        (MulticlassConfusionMatrix(CLASSES), "it returns several values, but val/… holds one"),
        (MulticlassF1Score(CLASSES, average=None), "it returns several values, but val/… holds one"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_metric_that_does_not_fit_is_found_before_the_run(metric: Any, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_metric("mine", metric, loss=CrossEntropy(), num_outputs=CLASSES, target_kind="classes")
    assert caught.value.setting == f"metrics.mine._target_={type(metric).__name__}"
    assert caught.value.reason.startswith(reason)
    assert "metrics.mine" in caught.value.fix


def test_metrics_that_fit_leave_no_trace_of_the_trial() -> None:
    for name, metric in {**make_metrics(), "perplexity": Perplexity(), "loss": MeanLoss()}.items():
        check_metric(name, metric, loss=CrossEntropy(), num_outputs=CLASSES, target_kind="classes")
        assert not metric.update_called, name


def test_an_argument_that_a_metric_rejects_is_a_config_error(tmp_path: Path) -> None:
    error = "{_target_: torchmetrics.classification.MulticlassCalibrationError, num_classes: 10, n_bins: 0}"
    config = composed_config("model=resnet18", f"+metrics.error={error}")
    with pytest.raises(ConfigError) as caught:
        build(resolved(config, tmp_path))
    said = str(caught.value)
    assert said.startswith("metrics.error: torchmetrics.classification.MulticlassCalibrationError says: ")
    assert "`n_bins`" in said
    assert said.endswith("; type '~metrics.error'")


def test_one_more_metric_is_one_override(text_folder: str, tmp_path: Path) -> None:
    top = "{_target_: torchmetrics.classification.MulticlassAccuracy, num_classes: 257, top_k: 3, average: micro}"
    overrides = [*TINY, f"data.path={text_folder}", "trainer.max_steps=2", "save_every=2", f"+metrics.top3={top}"]
    run = build(resolved(composed_config(*overrides, "checkpoint.monitor=val/top3"), tmp_path))
    run.trainer.fit(run.task, datamodule=run.data)
    last = read_metrics(tmp_path)[-1]
    assert [name for name in last if name.startswith("val/")] == [
        "val/loss",
        "val/perplexity",
        "val/token_accuracy",
        "val/top3",
    ]
    assert 0.0 <= last["val/token_accuracy"] < last["val/top3"] < 0.5
    assert last["val/perplexity"] == pytest.approx(math.exp(last["val/loss"]), rel=1e-6)


def test_a_mixture_of_one_source_has_its_loss_by_source() -> None:
    for sources in (["only"], ["one", "two"]):
        metrics = ValidationMetrics({}, loss=CrossEntropy(), sources=sources)
        losses = torch.tensor([[1.0, 3.0], [2.0, 6.0]])  # [B, T]
        targets = torch.zeros(2, 2, dtype=torch.int64)  # [B, T]
        metrics.update([Term(losses.sum())], outputs=torch.zeros(2, 2, 3), batch={"targets": targets})
        metrics.update_sources(losses, targets, torch.tensor([0, len(sources) - 1]))
        found = metrics.compute()
        assert found["val/loss"] == 3.0
        assert [found[f"val/{name}/loss"] for name in sources] == ([3.0] if len(sources) == 1 else [2.0, 4.0])
