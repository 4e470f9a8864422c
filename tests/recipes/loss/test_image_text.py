"""Losses of images with captions, against open_clip's and against their definitions in float64, pair by pair."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recipes.loss import image_text, logged_by_count
from recipes.loss.image_text import COMPARED, GRADIENTS, Clip, Features, PairLoss, Pairs, SigLip

OPEN_CLIP = json.loads((Path(__file__).parent / "open_clip.json").read_text(encoding="utf-8"))
SIZE, WIDTH = 7, 5
LOSSES: dict[str, type[PairLoss]] = {"clip": Clip, "siglip": SigLip}
both = pytest.mark.parametrize("name", LOSSES)


def make(name: str, repeated_captions: Any = "drop") -> PairLoss:
    return LOSSES[name](repeated_captions=repeated_captions)


def read() -> Features:
    """Return the features of the golden, float64."""
    shapes = [(SIZE, WIDTH), (SIZE, WIDTH), (1,), (1,)]
    values = (torch.tensor(flat, dtype=torch.float64) for flat in OPEN_CLIP["inputs"])
    return Features(*(value.view(shape).requires_grad_() for value, shape in zip(values, shapes, strict=True)))


def make_batch(captions: list[int] | None = None, images: list[int] | None = None, without: int = -1) -> dict[str, Any]:
    targets = torch.zeros(SIZE, dtype=torch.int64)
    if without >= 0:
        targets[without] = -100
    numbers = [*range(SIZE)]
    return {"targets": targets, "caption": torch.tensor(captions or numbers), "image": torch.tensor(images or numbers)}


def define(name: str, features: Features, negatives: list[list[int]]) -> Tensor:
    """Return the mean loss of the pairs, whose negatives are those listed for each."""
    images, captions, log_scale, bias = features
    losses = []
    for i, others in enumerate(negatives):

        def logit(image: int, caption: int) -> Tensor:
            cosine = torch.dot(images[image], captions[caption]) / images[image].norm() / captions[caption].norm()
            return cosine * log_scale.exp() + (bias if name == "siglip" else 0)

        if name == "clip":
            to_captions = torch.cat([logit(i, j) for j in [i, *others]])
            to_images = torch.cat([logit(j, i) for j in [i, *others]])
            losses.append(0.5 * (to_captions.logsumexp(0) + to_images.logsumexp(0)) - logit(i, i))
        else:
            wrong = [logit(i, j) for j in others]
            losses.append(-torch.log(torch.sigmoid(logit(i, i))) - sum(torch.log(1 - torch.sigmoid(x)) for x in wrong))
    return torch.stack([*losses]).mean()


@both
@pytest.mark.parametrize("num_rows", [1, 3, 1024])
def test_loss_and_gradients_are_those_of_open_clip(name: str, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_text, "_ROWS", num_rows)
    loss, features, batch = make(name), read(), make_batch()
    [term, *_] = loss(features, batch)
    mean = term.sum / int(loss.counts(batch)["num_pairs"])
    assert mean.item() == pytest.approx(OPEN_CLIP[name]["loss"], rel=1e-12)
    gradients = torch.autograd.grad(mean, features, allow_unused=True, materialize_grads=True)
    for gradient, expected in zip(gradients, OPEN_CLIP[name]["gradients"], strict=True):
        assert gradient.flatten().tolist() == pytest.approx(expected, rel=1e-10, abs=1e-13)


@both
def test_pairs_with_the_same_caption_or_image_are_no_negatives_of_each_other(name: str) -> None:
    features, batch = read(), make_batch(captions=[0, 1, 0, 3, 4, 5, 6], images=[0, 1, 2, 3, 4, 5, 4])
    same = [{0, 2}, {4, 6}]
    negatives = [[j for j in range(SIZE) if j != i and {i, j} not in same] for i in range(SIZE)]
    every = [[j for j in range(SIZE) if j != i] for i in range(SIZE)]
    for repeated, expected in (("drop", negatives), ("keep", every)):
        terms = make(name, repeated)(features, batch)
        assert terms[0].sum.item() / SIZE == pytest.approx(define(name, features, expected).item(), rel=1e-12)
        measured = {term.logged_as: term.sum.item() for term in terms}
        assert measured["repeated_captions"] == 2
        assert measured["logit_scale"] == pytest.approx(SIZE * math.exp(1.5))


@both
def test_a_pair_that_fills_up_a_validation_changes_nothing(name: str) -> None:
    features, loss = read(), make(name)
    kept = [0, 1, 2, 4, 5, 6]
    fewer = features._replace(images=features.images[kept], captions=features.captions[kept])
    batch = {key: value[kept] for key, value in make_batch().items()}
    without, expected = loss(features, make_batch(without=3)), loss(fewer, batch)
    assert loss.counts(make_batch(without=3)) == {"num_pairs": torch.tensor(6)}
    for term, other in zip(without, expected, strict=True):
        torch.testing.assert_close(term.sum, other.sum, rtol=1e-12, atol=0)


@both
def test_pairs_of_two_ranks_compared_in_parts_are_those_compared_at_once(name: str) -> None:
    features, loss, numbers = read(), make(name), torch.arange(SIZE)
    pairs = Pairs(numbers, numbers, torch.ones(SIZE, dtype=torch.bool))
    whole = loss.compare(features, features, pairs, first=0)
    parts = []
    for places in (slice(0, 3), slice(3, 7)):
        own = features._replace(images=features.images[places], captions=features.captions[places])
        parts.append(loss.compare(own, features, pairs, first=places.start))
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-14, atol=0)


@both
def test_the_scale_gets_its_gradient_once_however_many_micro_batches_there_are(name: str) -> None:
    """Named after a fault of open_clip: `--accum-freq 4` multiplies the gradient of the scale by 4."""
    loss, features = make(name), read()
    numbers = torch.arange(SIZE)
    pairs = Pairs(numbers, numbers, torch.ones(SIZE, dtype=torch.bool))
    compared = loss.compare(features, features, pairs, first=0)
    of_images, of_captions, *of_scalars = torch.autograd.grad(
        compared[:, 0].sum(), features, allow_unused=True, materialize_grads=True
    )
    objective = torch.zeros((), dtype=torch.float64)
    for places in (slice(0, 2), slice(2, 3), slice(3, 7)):
        own = features._replace(images=features.images[places], captions=features.captions[places])
        gradients = [of_images[places], of_captions[places], *(each / 3 for each in of_scalars)]
        batch = {"targets": torch.zeros(len(own.images)), GRADIENTS: gradients, COMPARED: compared[places].detach()}
        terms = loss(own, batch)
        objective = objective + terms[0].sum / SIZE
        assert logged_by_count(terms)["num_pairs"].item() == pytest.approx(compared[places, 0].sum().item())
    found = torch.autograd.grad(objective, features, allow_unused=True, materialize_grads=True)
    for gradient, expected in zip(found, OPEN_CLIP[name]["gradients"], strict=True):
        assert gradient.flatten().tolist() == pytest.approx(expected, rel=1e-10, abs=1e-13)


@both
def test_a_model_that_maps_everything_to_one_feature_finds_nothing(name: str) -> None:
    one = torch.ones(SIZE, WIDTH)
    terms = make(name)(Features(one, one, torch.zeros(1), torch.zeros(1)), make_batch())
    measured = {term.logged_as: term.sum.item() for term in terms}
    assert measured["image_to_caption_accuracy"] == measured["caption_to_image_accuracy"] == 0


def test_scores_of_a_trained_siglip_lose_no_digits_in_float32() -> None:
    """A pair at a logit of 20 has a loss of 2e-9, which 1 - p would round to 0, and softplus(x) - x to 0 as well."""
    features = Features(torch.eye(2), torch.eye(2), torch.tensor([math.log(20)]), torch.zeros(1))
    batch = {key: value[:2] for key, value in make_batch().items()}
    [term, *_] = make("siglip", "keep")(features, batch)
    assert term.sum.item() == pytest.approx(2 * (math.log1p(math.exp(-20)) + math.log(2)), rel=1e-6)
    own = make("siglip", "drop")(features, batch | {"caption": torch.zeros(2)})[0]
    assert own.sum.item() == pytest.approx(2 * math.log1p(math.exp(-20)), rel=1e-5)


@both
def test_where_all_captions_are_the_same_nothing_is_found(name: str) -> None:
    terms = make(name)(read(), make_batch(captions=[1] * SIZE))
    measured = {term.logged_as: term.sum.item() for term in terms}
    assert measured["image_to_caption_accuracy"] == measured["caption_to_image_accuracy"] == 0
    assert measured["repeated_captions"] == SIZE
