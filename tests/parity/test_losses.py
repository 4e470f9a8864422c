"""Every loss has one curve, whatever the engine and the split: with gaps in the targets, and with two denominators."""

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from cases import COMMON, ENGINES, IS_LONG, NUM_STEPS, case, largest_difference, shortened
from loss_cases import NUM_OUTPUTS, write_published
from ranks import run_on_ranks

TARGETS = {"bce": "labels", "mse": "values", "mae": "values", "huber": "values", "cross_entropy": "probabilities"}
ON_TWO = ["ddp", "fsdp", "fsdp, gradient sync per step", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3, offload"]
MESHES = ["tp2", "cp2, fsdp", "pp2"]
SPLITS = (1, 2, 4)


def of_images(loss: str, strategy: str, *, accumulate: int, world_size: int, weighted: bool = False) -> dict[str, Any]:
    """Return the experiment with a loss of labels, numbers, probabilities or weighted classes."""
    task = {"labels": "multilabel", "values": "regression"}.get(TARGETS[loss], "classification")
    data = {"_target_": "loss_cases.MaskedNumbers", "num_samples": 50, "targets": TARGETS[loss]}
    more = ["metrics=none"]
    if weighted:
        more += ["+loss.class_weights=[0.2,1,3,0.5,2,1,1,0.1,4,1]", "model.num_classes=10", "label_smoothing=0.1"]
        data = {"_target_": "support.MaskedImages", "num_samples": 50}
    return {
        "overrides": [
            *("model=resnet18", "model._target_=loss_cases.Pixels", "~model.small_images"),
            *("data=random_images", f"data.targets={'classes' if weighted else TARGETS[loss]}"),
            *(f"model.num_classes={NUM_OUTPUTS}", f"task={task}", f"loss={loss}", "optimizer.lr=1e-3"),
            *COMMON,
            *more,
            *ENGINES[strategy],
            f"micro_batch_size={16 // accumulate // world_size}",
            f"trainer.devices={world_size}",
        ],
        "data": data,
    }


def with_center(strategy: str, *, accumulate: int, world_size: int) -> dict[str, Any]:
    """Return the experiment with a loss that depends on a mean over the global batch, found before the step."""
    made = of_tokens(strategy, accumulate=accumulate, world_size=world_size)
    task = {"_target_": "loss_cases.Centering", "_partial_": True}
    return made | {"loss": {"_target_": "loss_cases.Centered"}, "task": task}


def with_contrast(strategy: str, *, world_size: int, task: str = "Contrasting") -> dict[str, Any]:
    """Return the experiment with a loss that compares each sample with those of all ranks."""
    made = of_tokens(strategy, accumulate=1, world_size=world_size)
    del made["loss"]
    return made | {"task": {"_target_": f"loss_cases.{task}", "_partial_": True}}


def of_views(strategy: str, *, accumulate: int, world_size: int) -> dict[str, Any]:
    """Return the experiment with NT-Xent, which compares two views of some images with those of the global batch."""
    return {
        "overrides": [
            *("model=resnet18", "model._target_=loss_cases.Pixels", "~model.small_images", "data=random_images"),
            *("task=contrastive", "task.hidden_size=16", "task.projection_size=8", "optimizer.lr=1e-2"),
            *COMMON,
            *ENGINES[strategy],
            f"micro_batch_size={16 // accumulate // world_size}",
            f"trainer.devices={world_size}",
        ],
        "data": {"_target_": "loss_cases.TwoViews", "num_samples": 50},
    }


def of_captions(strategy: str, *, accumulate: int, world_size: int, loss: str) -> dict[str, Any]:
    """Return the experiment with a loss that compares images with the captions of the global batch."""
    made = of_views(strategy, accumulate=accumulate, world_size=world_size)
    changed = {
        "model._target_=loss_cases.Pixels": "model._target_=loss_cases.TwoEncoders",
        "task=contrastive": "task=image_text",
    }
    overrides = [changed.get(each, each) for each in made["overrides"] if not each.startswith("task.")]
    unread = ("num_classes", "in_channels", "image_size", "random_crop_padding", "random_horizontal_flip", "targets")
    overrides += ["data._target_=loss_cases.Captioned", *(f"~data.{setting}" for setting in unread), f"loss={loss}"]
    data = {"_target_": "loss_cases.Captioned", "num_samples": 50}
    return {"overrides": overrides, "data": data, "gradients": True}


def of_towers(strategy: str, *, accumulate: int, world_size: int) -> dict[str, Any]:
    """Return the experiment with a tower of timm and one of text, trained as CLIP."""
    made = of_captions(strategy, accumulate=accumulate, world_size=world_size, loss="clip")
    kept = [each for each in made["overrides"] if not each.startswith(("model", "~model", "data", "~data"))]
    towers = [
        *("model=dual_encoder", "model.image_name=vit_tiny_patch16_224", "model.image_size=8", "model.in_channels=1"),
        "model.image_arguments={patch_size: 4, embed_dim: 32, depth: 2, num_heads: 2}",
        *("data=words", "model.vocab_size=257", "model.max_seq_len=6", "model.hidden_size=32", "model.num_layers=2"),
        *("model.num_heads=2", "model.projection_size=8"),
    ]
    return made | {"overrides": [*towers, *kept, "optimizer.lr=1e-3"]}


def of_published(strategy: str, *, accumulate: int, world_size: int, kind: str) -> dict[str, Any]:
    """Return the experiment with a CLIP or SigLIP model of transformers, with weights from the seed."""
    made = of_captions(strategy, accumulate=accumulate, world_size=world_size, loss=kind)
    kept = [each for each in made["overrides"] if not each.startswith(("model", "~model", "data", "~data"))]
    folder = write_published(Path(tempfile.mkdtemp()), kind=kind)
    model = ["model=clip", f"model.name={folder}", "model.pretrained=null", "data=words", "tokenizer=bytes"]
    return made | {"overrides": [*model, *kept, "optimizer.lr=1e-3"]}


def of_tokens(strategy: str, *, accumulate: int, world_size: int, model: str = "gpt2") -> dict[str, Any]:
    """Return the experiment of the parity tests with a loss of two denominators."""
    made = case(model, strategy=ENGINES[strategy], precision="32-true", accumulate=accumulate, world_size=world_size)
    return made | {"loss": {"_target_": "loss_cases.TwoCounts"}}


def make_cases(strategies: list[str], *, splits: tuple[int, ...], world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in strategies:
        for accumulate in splits:
            split = {"accumulate": accumulate, "world_size": world_size}
            found |= {f"{loss}, {strategy} x{accumulate}": of_images(loss, strategy, **split) for loss in TARGETS}
            weighted = of_images("cross_entropy", strategy, **split, weighted=True)
            found[f"weighted, {strategy} x{accumulate}"] = weighted
            found[f"two counts, {strategy} x{accumulate}"] = of_tokens(strategy, **split)
            found[f"centered, {strategy} x{accumulate}"] = with_center(strategy, **split)
            found[f"views, {strategy} x{accumulate}"] = of_views(strategy, **split)
            for loss in ("clip", "siglip"):
                found[f"{loss}, {strategy} x{accumulate}"] = of_captions(strategy, **split, loss=loss)
            for kind in ("clip", "siglip"):
                found[f"published {kind}, {strategy} x{accumulate}"] = of_published(strategy, **split, kind=kind)
            found[f"towers, {strategy} x{accumulate}"] = of_towers(strategy, **split)
    return found


REFERENCES = make_cases(["single"], splits=(1,), world_size=1)
REFERENCES["contrast, single x1"] = with_contrast("single", world_size=1)
ON_ONE = shortened(
    make_cases(["single"], splits=(2, 4), world_size=1),
    *(
        f"{loss}, single x4"
        for loss in ("bce", "mse", "cross_entropy", "weighted", "two counts", "centered", "views", "clip")
    ),
)
# an image model has no sequence, and is given whole to each pipeline stage
STAGED = {
    f"{loss}, {name} x{accumulate}": make(name, accumulate=accumulate, world_size=2)
    for loss, make in (("two counts", of_tokens), ("centered", with_center))
    for name in MESHES
    for accumulate in SPLITS
    if not (name == "pp2" and accumulate == 1)  # a schedule needs as many micro-batches as stages
}
# one micro-batch a step: a sample is compared with those of its micro-batch
CONTRASTS = {f"contrast, {strategy} x1": with_contrast(strategy, world_size=2) for strategy in ON_TWO} | {
    f"contrast, {strategy} {place}": with_contrast(strategy, world_size=2, task=task)
    for strategy in ("ddp", "fsdp", "ZeRO-2")
    for place, task in (("everywhere", "ContrastingEverywhere"), ("on the first", "ContrastingOnFirst"))
}
RANKS = shortened(
    make_cases(ON_TWO, splits=SPLITS, world_size=2) | STAGED | CONTRASTS,
    *("contrast, ddp x1", "contrast, fsdp x1", "contrast, ZeRO-2 x1"),
    *("contrast, ddp everywhere", "contrast, ZeRO-2 on the first"),
    *("bce, ddp x2", "mse, fsdp x2", "weighted, ZeRO-2 x2", "cross_entropy, ZeRO-3 x1"),
    *("two counts, ddp x2", "two counts, ZeRO-3 x2", "two counts, cp2, fsdp x1", "two counts, pp2 x2"),
    *("centered, ddp x2", "centered, fsdp x2", "centered, ZeRO-3 x2", "centered, pp2 x2"),
    *("views, ddp x2", "views, fsdp x1", "views, ZeRO-2 x2", "views, ZeRO-3 x4"),
    *("clip, ddp x2", "clip, fsdp x2", "clip, ZeRO-2 x2", "clip, ZeRO-3 x1", "siglip, fsdp x1", "siglip, ZeRO-2 x4"),
    *("towers, ddp x2", "towers, fsdp x1", "towers, ZeRO-3 x2"),
    *(
        "published clip, ZeRO-3 x2",
        "published clip, fsdp x4",
        "published siglip, ZeRO-3 x1",
        "published siglip, ddp x4",
    ),
)

# features of four ranks are compared with each other: as many processes on two cores, in long runs alone
ON_FOUR = {
    f"{loss}, {strategy} on four x{accumulate}": of_captions(strategy, accumulate=accumulate, world_size=4, loss=loss)
    for loss in ("clip", "siglip")
    for strategy in ("ddp", "fsdp", "ZeRO-2", "ZeRO-3")
    for accumulate in SPLITS
    if IS_LONG
}


LOSSES = [name.partition(",")[0] for name in REFERENCES]


def select(cases: dict[str, Any], losses: list[str]) -> dict[str, Any]:
    return {name: case for name, case in cases.items() if name.partition(",")[0] in losses}


# all cases of a short run share their processes; of a long one, those of a loss
@pytest.fixture(scope="module", params=[[loss] for loss in LOSSES] if IS_LONG else [LOSSES], ids=",".join)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of some losses by case."""
    found: dict[str, Any] = {}
    for cases, world_size in ((REFERENCES | ON_ONE, 1), (RANKS, 2), (ON_FOUR, 4)):
        chosen = select(cases, request.param)
        if chosen:
            found |= run_on_ranks(chosen, world_size=world_size, folder=tmp_path_factory.mktemp("losses"))
    return found


def test_the_curve_is_that_of_one_large_batch_on_one_device(results: dict[str, Any]) -> None:
    for name, result in results.items():
        assert "error" not in result, (name, result["error"])
    for name, result in results.items():
        rows, expected = result["rows"], results[f"{name.partition(',')[0]}, single x1"]["rows"]
        assert len(rows) == NUM_STEPS
        differences = largest_difference(rows, expected)
        # float32 sums in another order; the norm of a gradient of few samples keeps fewer digits than the loss
        assert differences["train/loss"] < 1e-5, (name, differences)
        assert differences["grad/norm"] < 1e-4, (name, differences)
        for key, value in expected[-1].items():
            if key.startswith("val/"):
                assert rows[-1][key] == pytest.approx(value, rel=1e-5), (name, key)
        if "views" in name:  # what is logged beside it is of the global batch, too
            for key in ("pretext_accuracy", "alignment", "uniformity"):
                assert rows[-1][f"train/{key}"] == pytest.approx(expected[-1][f"train/{key}"], rel=1e-5), (name, key)
        if name.startswith("clip"):
            scales = [row["train/logit_scale"] for row in rows]
            assert min(scales) == pytest.approx(math.exp(0.995)), name  # the limit, which it would pass
            for key in ("image_to_caption_accuracy", "caption_to_image_accuracy", "repeated_captions"):
                assert rows[-1][f"train/{key}"] == pytest.approx(expected[-1][f"train/{key}"]), (name, key)
        if "two counts" in name:  # a second quantity is logged beside the loss
            for row in rows:
                assert 0 < 0.05 * row["train/even_square"] < row["train/loss"], name
            assert 0 < 0.05 * rows[-1]["val/even_square"] < rows[-1]["val/loss"], name


def test_every_parameter_of_two_encoders_has_the_gradient_of_one_large_batch(results: dict[str, Any]) -> None:
    """A gather without gradient divides that of a feature by the ranks, or leaves out a part (open_clip#616, #894).

    The one of the scale must not grow with the micro-batches either, nor with the ranks. DeepSpeed has no gradients at
    the parameters: its curve alone is compared.
    """
    with_gradients = {name for name, result in results.items() if result["gradients"]}
    for name in with_gradients:
        found, expected = results[name]["gradients"], results[f"{name.partition(',')[0]}, single x1"]["gradients"]
        assert found.keys() == expected.keys(), name
        for parameter, gradient in expected.items():
            largest = max(map(abs, gradient))
            difference = max(abs(one - other) for one, other in zip(found[parameter], gradient, strict=True))
            if largest < 1e-6:  # what is left of a sum that is 0: of biases that change no softmax
                assert difference < 1e-6, (name, parameter, difference)
            else:
                assert difference <= 1e-5 * largest, (name, parameter, difference / largest)
    on_ranks = {name for name in with_gradients if "single" not in name}
    assert IS_LONG or on_ranks >= {"clip, ddp x2", "clip, fsdp x2", "siglip, fsdp x1"}
