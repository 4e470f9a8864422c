"""Transforms of images: what they draw is a function of the seed alone, and what they leave open is the model's."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformed_images import TransformedImages, make_transform

from recipes.data.batches import PositionSampler
from recipes.data.draws import DrawnSamples, rng_at
from recipes.data.loader_process import SignalProofLoader
from recipes.data.order import ShuffledOrder
from recipes.errors import ConfigError
from recipes.model.weights.llava_processor import write_pixels

timm: Any = pytest.importorskip("timm")
v2: Any = pytest.importorskip("torchvision.transforms.v2")

SETTINGS: dict[str, dict[str, Any]] = {
    "resized": {},
    "padded": {"crop": "padded", "padding": 3},
    "randaugment": {"policy": "randaugment", "erase": 1.0},
    "trivialaugment": {"policy": "trivialaugment", "erase": 1.0, "erase_with": "noise"},
    "three_augment": {"policy": "three_augment", "color_jitter": 0.3},
    "own": {"crop": "own", "flip": 0.0, "extra": {"crop": v2.RandomCrop(8), "colors": v2.RandomChannelPermutation()}},
}


def make_image(size: int = 40) -> Tensor:
    return torch.randint(256, (3, size, size), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_draw_depends_on_torchs_generator_on_the_host_and_on_no_other(settings: dict[str, Any]) -> None:
    transform, image = make_transform(**settings), make_image()

    def draw(seed: int) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return transform.draw(image)

    first = [draw(seed) for seed in range(8)]
    numpys: Any = np.random
    states = random.getstate(), numpys.get_state()[1].tolist()
    random.seed(5)
    np.random.seed(5)
    again = [draw(seed) for seed in range(8)]
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert len({tuple(one.flatten().tolist()) for one in first}) >= 7
    random.setstate(states[0])
    before = random.getstate(), numpys.get_state()[1].tolist()
    draw(0)
    assert (random.getstate(), numpys.get_state()[1].tolist()) == before
    assert all(one.shape == (3, 8, 8) and one.dtype == torch.float32 for one in first)
    assert torch.equal(transform(image), transform(image))


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_no_loader_processes_1_and_3_read_the_same_mixed_batches() -> None:
    settings: dict[str, Any] = {"policy": "trivialaugment", "erase": 0.5, "mixup": 0.8, "cutmix": 1.0}
    source: Any = TransformedImages(num_samples=20, transform=make_transform(**settings))

    def read(num_workers: int) -> list[dict[str, Tensor]]:
        options = {"micro_batch_size": 4, "rank": 0, "world_size": 1, "num_micro_batches": 6, "draws": True}
        sampler: Any = PositionSampler(ShuffledOrder(20, 3), start_position=0, **options)
        loader: Any = SignalProofLoader(DrawnSamples(source, 3), batch_sampler=sampler, num_workers=num_workers)
        return list(loader)

    alone = read(0)
    assert alone[0]["targets"].shape == (4, 10)
    assert alone[0]["targets"].sum(dim=1).tolist() == pytest.approx([1.0] * 4)
    for num_workers in (1, 3):
        for batch, other in zip(read(num_workers), alone, strict=True):
            assert all(torch.equal(batch[name], other[name]) for name in ("inputs", "targets"))
    one, other = (source.sample(0, rng_at(3, position))["inputs"] for position in (0, 20))
    assert not torch.equal(one, other)  # of another epoch


def test_what_is_left_open_is_that_of_the_models_published_weights() -> None:
    open_settings = dict.fromkeys(("size", "eval_crop", "interpolation", "mean", "std"))
    for name in ("convnext_tiny", "vit_small_patch16_224", "resnet50.a1_in1k", "test_vit"):
        pixels, known = make_transform(**open_settings, model=name).pixels, timm.get_pretrained_cfg(name)
        assert (pixels.size, pixels.eval_crop) == (known.input_size[-1], known.crop_pct)
        assert (pixels.interpolation, pixels.mean, pixels.std) == (known.interpolation, known.mean, known.std)
    transform = make_transform(**open_settings, model="test_vit")
    assert "size=160" in transform.describe_origin()
    assert transform.describe_origin().endswith("as published with timm's test_vit.r160_in1k")
    assert make_transform(model="test_vit").describe_origin() == ""
    assert make_transform(**open_settings | {"size": 48}, model="test_vit").pixels.size == 48
    unknown = make_transform(**open_settings, model="of_mine")
    assert (unknown.pixels.size, unknown.pixels.eval_crop) == (224, 0.875)
    assert "because timm publishes no weights of of_mine" in unknown.describe_origin()
    gray = make_transform(**open_settings, in_channels=1)
    assert gray.pixels.mean == (pytest.approx(0.449),)
    assert gray.draw(make_image()[:1]).shape == (1, 224, 224)


def test_validation_sees_what_timm_shows_but_for_the_rounding_of_pixels() -> None:
    from PIL import Image

    known = timm.get_pretrained_cfg("convnext_tiny")
    theirs = timm.data.create_transform((3, 56, 56), crop_pct=known.crop_pct, interpolation=known.interpolation)
    open_settings = dict.fromkeys(("eval_crop", "interpolation", "mean", "std"))
    transform = make_transform(**open_settings, model="convnext_tiny", size=56)
    smooth = torch.nn.functional.interpolate(make_image(8)[None].float(), size=(90, 120), mode="bilinear")[
        0
    ]  # [C, H, W]
    image = smooth.round().to(torch.uint8)
    expected = theirs(Image.fromarray(image.permute(1, 2, 0).numpy()))
    assert (transform(image) - expected).abs().max() * min(known.std) <= 2.0 / 255


def test_another_size_of_validation_is_that_of_its_samples() -> None:
    transform = make_transform(eval_size=12, eval_crop=0.75)
    assert transform(make_image()).shape == (3, 12, 12)
    assert transform.describe_eval().startswith("12/0.75/")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"extra": {"small": v2.Resize((5, 5))}},
            r"small: an image becomes \[3, 5, 5\], and the model reads \[3, 8, 8\]",
        ),
        ({"crop": "own"}, r"crop=own: an image becomes \[3, 256, 256\].*; type '\+transform.extra.crop="),
        ({"extra": {"wrong": v2.LinearTransformation(torch.eye(4), torch.zeros(4))}}, "they raise ValueError"),
        ({"mean": [0.5]}, "transform.mean has 1 channels"),
    ],
)
def test_transforms_of_another_shape_are_refused_before_the_run(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_transform(**settings)


def test_a_fingerprint_names_what_is_drawn_and_no_address() -> None:
    class Crop:
        def __call__(self, image: Tensor) -> Tensor:
            return image

    assert make_transform(size=8).describe() != make_transform(size=12).describe()
    zeros, noise = (make_transform(erase=0.5, erase_with=kind) for kind in ("zeros", "noise"))
    assert zeros.describe() != noise.describe()
    assert make_transform(extra={"crop": Crop()}).describe() == make_transform(extra={"crop": Crop()}).describe()


def test_a_model_whose_published_weights_saw_whole_images_squashed_sees_them_so() -> None:
    open_settings: dict[str, Any] = dict.fromkeys(("size", "eval_crop", "interpolation", "mean", "std"))
    squashed = make_transform(model="convnext_tiny.fb_in22k_ft_in1k_384", **open_settings)
    assert squashed.pixels.crop_mode == "squash"
    image = torch.zeros(3, 40, 400, dtype=torch.uint8)
    image[:, :, 380:] = 255  # at the right, which a center crop leaves out
    assert squashed(image)[0, :, -4:].min() > 0
    assert make_transform(size=8, eval_crop=1.0)(image)[0].max() < 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mean": [0.5, 0.5], "std": [0.5, 0.5]}, "of one channel, or of three colors"),
        ({"std": [0.5, 0.0, 0.5]}, "numbers greater than 0"),
        ({"scale": [0.5, 2.0]}, "part of an image that a crop takes"),
        ({"model": "resnet50.a1_in22k", "size": None}, "type: model.name=resnet50|model.name=resnet50"),
    ],
)
def test_numbers_that_cannot_be_are_refused_when_they_are_read(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_transform(**settings)


def test_a_clip_model_reads_what_its_folder_says_and_crops_the_center(tmp_path: Path) -> None:
    open_settings: dict[str, Any] = dict.fromkeys(("size", "eval_crop", "interpolation", "mean", "std"))
    config = {"model_type": "clip", "vision_config": {"image_size": 48}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    usual = make_transform(**open_settings, model=str(tmp_path))
    assert (usual.pixels.size, usual.pixels.eval_crop, usual.pixels.crop_mode) == (48, 1.0, "center")
    assert usual.pixels.mean == (0.48145466, 0.4578275, 0.40821073)
    assert f"as usual for clip, because there is no preprocessor_config.json in {tmp_path}" in usual.describe_origin()
    settings = {"crop_size": {"height": 48, "width": 48}, "size": {"shortest_edge": 64}, "resample": 2}
    settings |= {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "do_center_crop": True}
    for name, content in (
        ("processor_config.json", {"image_processor": settings}),
        ("preprocessor_config.json", settings | {"crop_size": 48, "size": 64}),  # as older versions write it
    ):
        (tmp_path / name).write_text(json.dumps(content))
        given = make_transform(**open_settings, model=str(tmp_path))
        assert given.pixels.mean == (0.1, 0.2, 0.3)
        assert (given.pixels.eval_crop, given.pixels.interpolation) == (0.75, "bilinear")
        assert given.describe_origin().endswith(f"as published with {tmp_path}")
    assert make_transform(**open_settings | {"size": 32}, model=str(tmp_path)).pixels.size == 32


@pytest.mark.parametrize("crop_mode", ["center", "squash"])
def test_an_export_is_read_as_the_same_pixels(crop_mode: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "siglip", "vision_config": {"image_size": 40}}))
    pixels = make_transform(size=40, eval_crop=0.8, mean=(0.1,) * 3, std=(0.7,) * 3).pixels
    mode: Any = crop_mode
    exported = replace(pixels, crop_mode=mode)
    write_pixels(exported, tmp_path)
    open_settings: dict[str, Any] = dict.fromkeys(("size", "eval_crop", "interpolation", "mean", "std"))
    found = make_transform(**open_settings, model=str(tmp_path)).pixels
    names = ("eval_size", "eval_crop", "crop_mode", "interpolation", "mean", "std")
    assert [getattr(found, name) for name in names] == [getattr(exported, name) for name in names]


@pytest.mark.parametrize("kind", ["clip", "siglip", "llava"])
def test_validation_sees_what_the_image_processor_of_transformers_shows(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from PIL import Image
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    processor: Any = (
        CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
        if kind != "siglip"
        else SiglipImageProcessorPil(size={"height": 32, "width": 32})
    )
    processor.save_pretrained(str(tmp_path))
    config = {"model_type": kind, "vision_config": {"model_type": "clip_vision_model", "image_size": 32}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    open_settings: dict[str, Any] = dict.fromkeys(("size", "eval_crop", "interpolation", "mean", "std"))
    transform = make_transform(**open_settings, model=str(tmp_path))
    smooth = torch.nn.functional.interpolate(make_image(8)[None].float(), size=(90, 120), mode="bilinear")[0]
    image = smooth.round().to(torch.uint8)  # [C, H, W]
    expected = processor(Image.fromarray(image.permute(1, 2, 0).numpy()), return_tensors="pt")["pixel_values"][0]
    # both round pixels to 8 bits after they are resized, in another order of sums
    assert (transform(image) - expected).abs().max() * min(transform.pixels.std) <= 2.0 / 255


def test_a_damaged_description_of_a_published_model_is_named(tmp_path: Path) -> None:
    open_settings: dict[str, Any] = dict.fromkeys(("size", "eval_crop", "interpolation", "mean", "std"))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=f"model.name={tmp_path}: .*config.json"):
        make_transform(**open_settings, model=str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    (tmp_path / "preprocessor_config.json").write_text('{"resample": 7}')
    with pytest.raises(ConfigError, match=r"model.name=.*preprocessor_config.json"):
        make_transform(**open_settings, model=str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    other = make_transform(**open_settings, model=str(tmp_path))
    assert f"usual for ImageNet, because {tmp_path} is no CLIP, SigLIP or LLaVA model" in other.describe_origin()
