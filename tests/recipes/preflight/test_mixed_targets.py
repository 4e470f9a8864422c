"""The loss of mixed images, whose targets are probabilities, is compared with the cross-entropy of its logits, too."""

import torch

from recipes.loss import get_mean
from recipes.loss.cross_entropy import CrossEntropy
from recipes.preflight.model import Expected, _check_loss


def test_the_loss_of_mixed_images_is_the_cross_entropy_and_twice_of_it_is_not() -> None:
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))  # [B, V]
    hot = torch.eye(5)[torch.tensor([0, 4, 2, 1, 1, 3])]
    batch = {"targets": 0.7 * hot + 0.3 * hot.flip(0)}
    expected = Expected(num_classes=5, starts_trained=False, in_float8=False)
    loss = get_mean(CrossEntropy(), logits, batch)
    assert _check_loss(loss, logits, batch, expected).status == "pass"
    assert _check_loss(2 * loss, logits, batch, expected).status != "pass"
