"""Runs with mixup or cutmix: a micro-batch has pairs, and the loss reads targets of two classes."""

import pytest

from recipes.config import compose_and_check

IMAGES = ("model=timm", "model.num_classes=10", "data=image_folder", "data.path=.")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (("transform.mixup=0.2", "global_batch_size=15"), ("global_batch_size=15 transform.mixup=0.2", "=16 ")),
        (("transform.cutmix=1.0", "global_batch_size=30", "micro_batch_size=5"), ("micro_batch_size=5", "type micro")),
        (("transform.mixup=0.2", "+loss.threshold=0.2"), ("loss.threshold", "")),
        (
            ("transform.mixup=0.2", "loss={_target_: dataset_cases.ClassesAlone}"),
            ("transform.mixup=0.2 loss=", "a mixed image is of two of them"),
        ),
    ],
)
def test_what_cannot_be_mixed_is_refused_before_torch_is_imported(
    typed: tuple[str, ...], expected: tuple[str, str]
) -> None:
    _, mistakes = compose_and_check([*IMAGES, *typed])
    [mistake] = map(str, mistakes)
    assert all(text in mistake for text in expected), mistake


@pytest.mark.parametrize(
    "typed",
    [
        ("transform.mixup=0.2", "global_batch_size=16"),
        ("transform.mixup=0.2", "transform.mix_probability=0", "global_batch_size=15"),
        ("global_batch_size=15",),
        ("transform.cutmix=1.0", "loss=bce", "label_smoothing=0.1", "+loss.threshold=0.2"),
        ("transform.mixup=0.2", "global_batch_size=15", "mode=plan"),
    ],
)
def test_pairs_compose(typed: tuple[str, ...]) -> None:
    assert compose_and_check([*IMAGES, *typed])[1] == []
