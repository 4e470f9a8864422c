"""Mistakes about the loss: each is one sentence, and its fix composes."""

import pytest

from recipes.config import compose_and_check

_IMAGES = "model=resnet18 data=random_images"

# what is typed -> the mistake, and what to type beside or instead of it
MISTAKES = {
    f"{_IMAGES} data.targets=labels": (
        "loss=cross_entropy data=random_images: the loss reads classes or probabilities, the targets of the data are"
        " labels; type task=multilabel",
        "task=multilabel",
    ),
    f"{_IMAGES} data.targets=values task=classification loss=bce": (
        "loss=bce data=random_images: the loss reads labels or classes, the targets of the data are values; type"
        " task=regression loss=mse",
        "task=regression loss=mse",
    ),
    f"{_IMAGES} data.targets=labels task=multilabel loss=mse": (
        "loss=mse data=random_images: the loss reads values, the targets of the data are labels; type loss=bce",
        "loss=bce",
    ),
    "loss=mse": (
        "loss=mse data=stdlib_text: the loss reads values, the targets of the data are classes; type"
        " loss=cross_entropy",
        "loss=cross_entropy",
    ),
    f"{_IMAGES} +loss.class_weights=[1,2]": (
        "loss.class_weights=[1,2]: it has 2 weights, and the model has 10 outputs; type +loss.class_weights=<a list of"
        " 10 numbers>",
        "+loss.class_weights=[1,2,1,1,1,1,1,1,1,1]",
    ),
    f"{_IMAGES} +loss.class_weights=[0,0,0,0,0,0,0,0,0,0]": (
        "loss.class_weights=[0,0,0,0,0,0,0,0,0,0]: with weights of 0 nothing is learned; type"
        " +loss.class_weights with a weight above 0",
        "+loss.class_weights=[1,0,0,0,0,0,0,0,0,0]",
    ),
    f"{_IMAGES} data.targets=labels task=multilabel +loss.pos_weight=[1,2]": (
        "loss.pos_weight=[1,2]: it has 2 weights, and the model has 10 outputs; type +loss.pos_weight=<a list of 10"
        " numbers>",
        "+loss.pos_weight=3",
    ),
    f"{_IMAGES} model.num_classes=1 metrics=none": (
        "model.num_classes=1: with one class there is nothing to learn; type model.num_classes=2",
        "model.num_classes=2",
    ),
    f"{_IMAGES} data.targets=values task=regression +loss.delta=1": (
        "loss.delta=1: MSE has no argument 'delta'; type loss=huber loss.delta=1",
        "loss=huber loss.delta=1",
    ),
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_loss_that_does_not_fit_is_one_mistake_whose_fix_composes(typed: str) -> None:
    expected, fix = MISTAKES[typed]
    _, mistakes = compose_and_check(typed.split())
    assert [str(mistake) for mistake in mistakes] == [expected]
    keys = {override.lstrip("+").partition("=")[0] for override in fix.split()}
    others = [override for override in typed.split() if override.lstrip("+").partition("=")[0] not in keys]
    _, mistakes = compose_and_check([*others, *fix.split()])
    assert mistakes == []
