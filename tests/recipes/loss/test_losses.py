"""Each loss against torch's own function, and the sums and counts that make it exact for any split of a batch."""

import re
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.data.batches import sum_counts
from recipes.errors import ConfigError
from recipes.loss import Loss, TargetLoss, Term, add_up, detach, divide, get_mean, logged_by_count, sum_by_count
from recipes.loss.bce import BCE
from recipes.loss.cross_entropy import CrossEntropy
from recipes.loss.regression import MAE, MSE, Huber

B, V = 12, 5
WEIGHTS = [0.2, 1.0, 3.0, 0.5, 2.0]
WEIGHT = torch.tensor(WEIGHTS, dtype=torch.float64)  # [V]
CLASSES = torch.tensor([0, 4, 2, -100, 1, 1, 3, -100, 2, 0, 4, 2])  # [B]
GENERATOR = torch.Generator().manual_seed(0)
LABELS = torch.randint(2, (B, V), generator=GENERATOR).double()  # [B, V]
VALUES = torch.randn(B, V, generator=GENERATOR, dtype=torch.float64)
SOFT = torch.randn(B, V, generator=GENERATOR, dtype=torch.float64).softmax(dim=1)
WITHOUT_ONE = SOFT.where(torch.arange(B)[:, None] != 5, torch.nan)
HAS_CLASS = CLASSES != -100
AS_THEY_ARE = {"center": 0.0, "scale": 1.0}  # targets


def outputs() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (3 * torch.randn(B, V, generator=generator, dtype=torch.float64)).requires_grad_()  # [B, V]


def with_gaps(targets: Tensor) -> Tensor:
    """Return targets of which the first of sample 2, and all of sample 5, are unknown."""
    targets = targets.clone()
    targets[2, 0] = targets[5] = torch.nan
    return targets


def of_known(function: Callable[..., Tensor], **options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return torch's mean over the known numbers."""

    def mean(found: Tensor, targets: Tensor) -> Tensor:
        known = ~targets.isnan()
        return function(found[known], targets[known], **options)

    return mean


def weighted_labels(found: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(found, targets, pos_weight=WEIGHT)


def one_hot(found: Tensor, targets: Tensor) -> Tensor:
    known = targets != -100
    return F.binary_cross_entropy_with_logits(found[known], F.one_hot(targets[known], V).double())


def soft_without_the_sixth(found: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(found[torch.arange(B) != 5], targets[torch.arange(B) != 5])


CASES: dict[str, tuple[Loss, Tensor, Callable[[Tensor, Tensor], Tensor]]] = {
    "classes": (CrossEntropy(), CLASSES, F.cross_entropy),
    "smoothed classes": (
        CrossEntropy(label_smoothing=0.1),
        CLASSES,
        lambda found, targets: F.cross_entropy(found, targets, label_smoothing=0.1),
    ),
    "weighted classes": (
        CrossEntropy(class_weights=WEIGHTS),
        CLASSES,
        lambda found, targets: F.cross_entropy(found, targets, weight=WEIGHT),
    ),
    "weighted and smoothed classes": (
        CrossEntropy(class_weights=WEIGHTS, label_smoothing=0.2),
        CLASSES,
        lambda found, targets: F.cross_entropy(found, targets, weight=WEIGHT, label_smoothing=0.2),
    ),
    "soft targets": (CrossEntropy(), SOFT, F.cross_entropy),
    "smoothed soft targets": (
        CrossEntropy(label_smoothing=0.1),
        SOFT,
        lambda found, targets: F.cross_entropy(found, targets, label_smoothing=0.1),
    ),
    "weighted soft targets": (
        CrossEntropy(class_weights=WEIGHTS),
        SOFT,
        lambda found, targets: (
            F.cross_entropy(found, targets, weight=WEIGHT) * (B / B)
        ),  # of probabilities torch divides by their number
    ),
    "soft targets with a gap": (
        CrossEntropy(),
        with_gaps(SOFT).where(torch.arange(B)[:, None] == 5, SOFT),
        soft_without_the_sixth,
    ),
    "z-loss": (
        CrossEntropy(z_loss=1e-2),
        CLASSES,
        lambda found, targets: (
            F.cross_entropy(found, targets) + 1e-2 * found[HAS_CLASS].logsumexp(dim=1).square().mean()
        ),
    ),
    "labels": (BCE(), LABELS, F.binary_cross_entropy_with_logits),
    "labels, some unknown": (BCE(), with_gaps(LABELS), of_known(F.binary_cross_entropy_with_logits)),
    "weighted labels": (BCE(pos_weight=WEIGHTS), LABELS, weighted_labels),
    "one class against all others": (BCE(), CLASSES, one_hot),
    "squared": (MSE(**AS_THEY_ARE), VALUES, F.mse_loss),
    "squared, some unknown": (MSE(**AS_THEY_ARE), with_gaps(VALUES), of_known(F.mse_loss)),
    "absolute": (MAE(**AS_THEY_ARE), with_gaps(VALUES), of_known(F.l1_loss)),
    "Huber": (Huber(delta=0.7, **AS_THEY_ARE), with_gaps(VALUES), of_known(F.huber_loss, delta=0.7)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sizes", [(12,), (6, 6), (1, 4, 7), (1,) * 12], ids=str)
def test_value_and_gradient_are_those_of_torchs_mean_over_the_whole_batch(name: str, sizes: tuple[int, ...]) -> None:
    loss, targets, reference = CASES[name]
    expected_outputs, found_outputs = outputs(), outputs()
    expected = reference(expected_outputs, targets)
    expected.backward()
    parts = targets.split(sizes)
    counts = sum_counts([loss.counts({"targets": part}) for part in parts], lambda value: value)
    value = torch.zeros((), dtype=torch.float64)
    for part, of_part in zip(parts, found_outputs.split(sizes), strict=True):
        objective = divide(sum_by_count(loss(of_part, {"targets": part})), counts)
        objective.backward(retain_graph=True)
        value += objective.detach()
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found_outputs.grad, expected_outputs.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_the_losses_of_samples_add_up_to_the_loss_without_regularizers(name: str) -> None:
    loss, targets, _ = CASES[name]
    batch = {"targets": targets}
    terms = loss(outputs(), batch)
    per_sample = loss.per_sample(outputs(), batch)  # [B]
    carries = loss.has_loss(targets).reshape(B, -1).sum(dim=1)  # type: ignore[attr-defined]
    assert per_sample.shape == (B,)
    summed = (per_sample * carries)[carries > 0].sum()
    [logged] = logged_by_count(terms).values()
    torch.testing.assert_close(summed, logged, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_outputs_in_bfloat16_are_summed_in_float32(name: str) -> None:
    loss, targets, reference = CASES[name]
    narrow = outputs().detach().bfloat16()
    targets = targets.float() if targets.is_floating_point() else targets
    found = divide(sum_by_count(loss(narrow, {"targets": targets})), loss.counts({"targets": targets}))
    expected = reference(narrow.double(), targets.double() if targets.is_floating_point() else targets)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)  # float32 sums


def test_one_output_is_compared_with_one_number_and_not_with_all_of_the_batch() -> None:
    targets = torch.arange(4.0)  # [B]
    predicted = targets[:, None] + 1  # [B, 1]
    assert MSE(**AS_THEY_ARE)(predicted, {"targets": targets})[0].sum == 4.0
    with pytest.raises(ValueError, match=r"outputs \[4, 3\] and targets \[4\]: a loss of numbers needs"):
        MSE(**AS_THEY_ARE)(torch.zeros(4, 3), {"targets": targets})


def test_numbers_far_from_0_are_learned_centered_and_scaled_and_measured_in_their_own_unit() -> None:
    targets = torch.tensor([150.0, 240.0, torch.nan])
    loss, outputs = MSE(center=150.0, scale=90.0), torch.tensor([[0.0], [2.0], [5.0]])
    assert loss(outputs, {"targets": targets})[0].sum == 1.0, "(2 - 1)^2: the model learns 0 and 1"
    predicted, known = loss.to_metrics(outputs, {"targets": targets})
    assert (predicted.tolist(), known.tolist()) == ([150.0, 330.0], [150.0, 240.0])
    assert loss.to_predictions(outputs, {"targets": targets})["values"].tolist() == [150.0, 330.0, 600.0]
    assert Huber(delta=0.5, center=150.0, scale=90.0)(outputs, {"targets": targets})[0].sum == 0.375


def test_padding_columns_of_the_outputs_are_in_no_loss() -> None:
    padded = torch.cat([outputs().detach(), torch.full((B, 3), -torch.inf, dtype=torch.float64)], dim=1)  # [B, V + 3]
    for loss in (CrossEntropy(label_smoothing=0.1, z_loss=1e-3), CrossEntropy(class_weights=WEIGHTS)):
        [expected] = sum_by_count(loss(outputs(), {"targets": CLASSES})).values()
        loss.num_outputs = V
        [found] = sum_by_count(loss(padded, {"targets": CLASSES})).values()
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
        loss.num_outputs = None


def test_counts_that_do_not_vary_are_known_without_reading_samples() -> None:
    assert CrossEntropy().counts_of_sample(16) == MSE(**AS_THEY_ARE).counts_of_sample(16) == {"num_targets": 16}
    assert CrossEntropy().counts_of_sample(None) is None
    assert CrossEntropy(class_weights=WEIGHTS).counts_of_sample(16) is None, "the weights of the targets vary"


def test_a_batch_without_targets_has_loss_and_gradient_zero() -> None:
    for loss, targets in (
        (CrossEntropy(class_weights=WEIGHTS), torch.full((B,), -100)),
        (MSE(**AS_THEY_ARE), torch.full((B, V), torch.nan, dtype=torch.float64)),
    ):
        found = outputs()
        counts = sum_counts([loss.counts({"targets": targets})], lambda value: value)
        divide(sum_by_count(loss(found, {"targets": targets})), counts).backward()
        assert found.grad is not None
        assert not found.grad.any()


class TwoCounts(Loss):
    """The loss of targets, and a measured square of what the outputs of marked samples are."""

    count_names = ("num_targets", "num_marked")
    measures: ClassVar[dict[str, str]] = {"marked": "num_marked"}

    def counts(self, batch: Any) -> dict[str, Tensor]:
        return {"num_targets": (batch["targets"] != -100).sum(), "num_marked": batch["marked"].sum()}

    def __call__(self, outputs: Any, batch: Any) -> list[Term]:
        losses = F.cross_entropy(outputs, batch["targets"], reduction="sum")
        squares = (outputs.square().sum(dim=1) * batch["marked"]).sum()
        return [
            Term(losses),
            Term(squares, per="num_marked", weight=0.25),
            Term(squares.detach(), per="num_marked", weight=0.0, logged_as="marked"),
        ]

    def per_sample(self, outputs: Any, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch["targets"], reduction="none")


def test_a_loss_of_two_denominators_divides_each_sum_by_its_own_count_of_the_global_batch() -> None:
    loss, marked = TwoCounts(), torch.arange(B) % 5 == 0
    counts = {"num_targets": HAS_CLASS.sum(), "num_marked": marked.sum()}
    found = outputs()
    value = torch.zeros((), dtype=torch.float64)
    for rows in torch.arange(B).split((1, 4, 7)):
        batch = {"targets": CLASSES[rows], "marked": marked[rows]}
        value = value + divide(sum_by_count(loss(found[rows], batch)), counts)
    expected = F.cross_entropy(outputs(), CLASSES) + 0.25 * outputs()[marked].square().sum(dim=1).mean()
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    whole = {"targets": CLASSES, "marked": marked}
    torch.testing.assert_close(get_mean(loss, outputs(), whole), expected.detach(), rtol=1e-12, atol=1e-12)


def test_the_terms_of_micro_batches_add_up_to_those_of_the_batch() -> None:
    loss, marked = TwoCounts(), torch.arange(B) % 5 == 0
    terms = [
        detach(term)
        for rows in torch.arange(B).split(4)
        for term in loss(outputs()[rows], {"targets": CLASSES[rows], "marked": marked[rows]})
    ]
    added = add_up(terms, torch.zeros((), dtype=torch.float64))
    whole = [detach(term) for term in loss(outputs(), {"targets": CLASSES, "marked": marked})]
    assert [term._replace(sum=None) for term in added] == [term._replace(sum=None) for term in whole]  # type: ignore[arg-type]
    for one, other in zip(added, whole, strict=True):
        torch.testing.assert_close(one.sum, other.sum, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("losses", "shape"),
    [
        (lambda outputs, targets: (outputs - targets) ** 2, [4, 4]),  # [4, 1] - [4]
        (lambda outputs, targets: ((outputs.squeeze(-1) - targets) ** 2).mean(), []),
    ],
)
def test_more_or_fewer_losses_than_targets_are_refused_instead_of_summed(losses: Any, shape: list[int]) -> None:
    class Own(TargetLoss):
        target_kinds = ("values",)

        def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return losses(outputs, targets)  # type: ignore[no-any-return]

    batch = {"targets": torch.zeros(4)}
    for ask in (Own(), Own().per_sample):
        with pytest.raises(ConfigError, match=re.escape(f"losses() returns {shape} for [4] targets")):
            ask(torch.zeros(4, 1), batch)
