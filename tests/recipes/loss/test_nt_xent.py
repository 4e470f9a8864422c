"""NT-Xent of projections, against its definition in float64, one pair of views after the other."""

import math

import pytest
import torch
from torch import Tensor

from recipes.loss import logged_by_count, nt_xent
from recipes.loss.nt_xent import COMPARED, GRADIENT, UNIFORMITY, NTXent, find_uniformity

NUM_IMAGES, SIZE, TEMPERATURE = 6, 5, 0.3


def draw(*, seed: int = 0) -> Tensor:
    """Return projections [N, 2, F] float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_IMAGES, 2, SIZE, dtype=torch.float64, generator=generator, requires_grad=True)


def define(projections: Tensor) -> Tensor:
    """Return the mean over the 2 N views of -log(exp(s_ij / t) / sum_k!=i exp(s_ik / t)), as the paper writes it."""
    views = [view / view.norm() for image in projections for view in image]
    losses = []
    for i, view in enumerate(views):
        others = [torch.dot(view, other) / TEMPERATURE for k, other in enumerate(views) if k != i]
        partner = torch.dot(view, views[i + 1 if i % 2 == 0 else i - 1]) / TEMPERATURE
        losses.append(torch.stack(others).exp().sum().log() - partner)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("num_rows", [1, 5, 1024])
def test_loss_and_gradient_are_those_of_the_definition(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nt_xent, "_ROWS", num_rows)
    projections = draw()
    batch = {"targets": torch.zeros(NUM_IMAGES, dtype=torch.int64)}
    loss = NTXent(temperature=TEMPERATURE)
    terms, expected = loss(projections, batch), define(projections)
    num_views = int(loss.counts(batch)["num_views"])
    assert num_views == 2 * NUM_IMAGES
    assert terms[0].sum.item() / num_views == pytest.approx(expected.item(), rel=1e-12)
    [gradient] = torch.autograd.grad(terms[0].sum / num_views, projections, retain_graph=True)
    [by_definition] = torch.autograd.grad(expected, projections)
    torch.testing.assert_close(gradient, by_definition, rtol=1e-10, atol=1e-12)
    assert loss.per_sample(projections, batch).mean().item() == pytest.approx(expected.item(), rel=1e-12)


def test_images_of_two_ranks_compared_in_parts_are_those_compared_at_once() -> None:
    loss, projections, carries = NTXent(temperature=TEMPERATURE), draw(), torch.ones(NUM_IMAGES, dtype=torch.bool)
    whole = loss.compare(projections, projections, first=0, carries=carries)
    parts = [loss.compare(projections[i : i + 2], projections, first=i, carries=carries) for i in (0, 2, 4)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=0)


def test_an_image_without_target_changes_nothing() -> None:
    loss, projections = NTXent(temperature=TEMPERATURE), draw()
    targets = torch.zeros(NUM_IMAGES, dtype=torch.int64)
    targets[3] = -100
    kept = projections[[0, 1, 2, 4, 5]]
    terms = loss(projections, {"targets": targets})
    expected = loss(kept, {"targets": torch.zeros(5, dtype=torch.int64)})
    for term, other in zip(terms, expected, strict=True):
        assert term.sum.item() == pytest.approx(other.sum.item(), rel=1e-12)
    [gradient] = torch.autograd.grad(terms[0].sum, projections)
    assert gradient[3].abs().max() == 0
    assert gradient.isfinite().all()


def test_what_is_logged_beside_the_loss_is_as_it_is_defined() -> None:
    loss, projections = NTXent(temperature=TEMPERATURE), draw()
    units = (projections / projections.norm(dim=2, keepdim=True)).detach()  # [N, 2, F]
    terms = {term.logged_as: term.sum.item() for term in loss(projections, {"targets": torch.zeros(NUM_IMAGES)})}
    distances = (units[:, 0] - units[:, 1]).square().sum(dim=1)  # [N]
    assert terms["alignment"] / 12 == pytest.approx(distances.mean().item())
    views = units.flatten(0, 1)
    kernels = [
        math.exp(-2 * (views[i] - views[k]).square().sum().item())
        for i in range(12)
        for k in range(12)
        if i // 2 != k // 2
    ]
    assert terms["uniformity"] / 12 == pytest.approx(math.log(sum(kernels) / len(kernels)))
    nearest = (views @ views.T).fill_diagonal_(-2).argmax(dim=1)  # [2 N]
    hits = sum(int(other) == i ^ 1 for i, other in enumerate(nearest))
    assert 0 < hits < 12
    assert terms["pretext_accuracy"] == hits


def test_a_compared_batch_has_the_logged_loss_of_all_and_their_gradient() -> None:
    loss, projections = NTXent(temperature=TEMPERATURE), draw()
    carries = torch.ones(NUM_IMAGES, dtype=torch.bool)
    compared = loss.compare(projections, projections, first=0, carries=carries)
    [gradient] = torch.autograd.grad(compared[:, 0].sum(), projections)
    part = {
        "targets": torch.zeros(2),
        COMPARED: compared[2:4].detach(),
        GRADIENT: gradient[2:4],
        UNIFORMITY: find_uniformity(compared.detach().sum(dim=0)),
    }
    terms = loss(projections[2:4], part)
    assert logged_by_count(terms)["num_views"].item() == pytest.approx(compared[2:4, 0].sum().item())
    [of_part] = torch.autograd.grad(terms[0].sum, projections)
    torch.testing.assert_close(of_part[2:4], gradient[2:4], rtol=0, atol=0)
