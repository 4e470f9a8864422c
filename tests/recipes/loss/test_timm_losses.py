"""Losses of classes against timm's in float64: smoothed, of mixed targets, and binary with a threshold."""

from typing import Any

import pytest
import torch
from torch import Tensor

from recipes.loss import Loss, sum_by_count
from recipes.loss.bce import BCE
from recipes.loss.cross_entropy import CrossEntropy

timm_losses: Any = pytest.importorskip("timm.loss")

B, V = 6, 5
CLASSES = torch.tensor([0, 4, 2, 1, 1, 3])  # [B]
_SHARE = torch.tensor([0.7, 0.1, 0.5, 1.0, 0.25, 0.9], dtype=torch.float64)[:, None]  # [B, 1]
_HOT = torch.nn.functional.one_hot(CLASSES, V).double()
MIXED = _SHARE * _HOT + (1 - _SHARE) * _HOT.flip(0)  # [B, V]


def get_mean(loss: Loss, logits: Tensor, targets: Tensor) -> Tensor:
    loss.target_kind = "classes"  # of the data, also where images are mixed
    batch = {"targets": targets}
    [(per, total)] = sum_by_count(loss(logits, batch)).items()
    assert int(loss.counts(batch)[per]) == B  # one for each sample, whatever its targets are
    return total / B


@pytest.mark.parametrize(
    ("own", "theirs", "targets", "factor"),
    [
        (CrossEntropy(), timm_losses.SoftTargetCrossEntropy(), MIXED, 1),
        (CrossEntropy(label_smoothing=0.1), timm_losses.LabelSmoothingCrossEntropy(0.1), CLASSES, 1),
        (BCE(), timm_losses.BinaryCrossEntropy(0.0), CLASSES, 1),
        (BCE(), timm_losses.BinaryCrossEntropy(0.0), MIXED, 1),
        (BCE(label_smoothing=0.1), timm_losses.BinaryCrossEntropy(0.1), CLASSES, 1),
        (BCE(threshold=0.2), timm_losses.BinaryCrossEntropy(0.0, target_threshold=0.2), MIXED, 1),
        (BCE(pos_weight=3.0), timm_losses.BinaryCrossEntropy(0.0, pos_weight=3.0), MIXED, 1),
        (BCE(), timm_losses.BinaryCrossEntropy(0.0, sum_classes=True), MIXED, V),
    ],
    ids=["mixed", "smoothed", "binary", "mixed binary", "smoothed binary", "threshold", "positive", "sum of classes"],
)
def test_value_and_gradient_are_those_of_timm(own: Loss, theirs: Any, targets: Tensor, factor: int) -> None:
    logits = torch.randn(B, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    expected = theirs(logits, targets)
    found = get_mean(own, logits, targets) * factor
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    of_found, of_expected = (torch.autograd.grad(value, logits)[0] for value in (found, expected))
    assert torch.allclose(of_found, of_expected, rtol=1e-12, atol=1e-15)


def test_smoothing_of_mixed_targets_is_that_of_timms_mixup_and_the_logged_loss_is_without_it() -> None:
    logits = torch.randn(B, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    smoothed = MIXED * 0.9 + 0.1 / V
    for own, theirs in ((CrossEntropy, timm_losses.SoftTargetCrossEntropy()), (BCE, timm_losses.BinaryCrossEntropy())):
        assert get_mean(own(label_smoothing=0.1), logits, MIXED).item() == pytest.approx(
            theirs(logits, smoothed).item(), rel=1e-12
        )
        loss = own(label_smoothing=0.1)
        loss.target_kind = "classes"
        [term] = loss(logits, {"targets": MIXED})
        assert isinstance(term.in_loss, Tensor)
        assert (term.in_loss / B).item() == pytest.approx(get_mean(own(), logits, MIXED).item(), rel=1e-12)


def test_metrics_of_mixed_targets_take_the_class_with_the_larger_share() -> None:
    loss = BCE()
    loss.target_kind = "classes"
    _, classes = loss.to_metrics(torch.zeros(B, V), {"targets": MIXED})
    assert classes.tolist() == MIXED.argmax(dim=1).tolist()
