"""An image model of timm beside a small tower of text: its features, first weights, and published image weights."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from timm_models import CONVNEXT, MODELS, RESNET, VIT, make_images, small, theirs
from torch import Tensor

from recipes.blocks import named_blocks
from recipes.errors import ConfigError
from recipes.model.dual_encoder import DualEncoder
from recipes.model.flops import flops_per_sample
from recipes.model.norm import list_batch_norms
from recipes.model.weights import await_checkpoint, initialize
from recipes.model.weights.any_module import load_weights, save_weights
from recipes.model.weights.huggingface import why_no_format
from recipes.optimizer.param_groups import find_decayed

torch.set_num_threads(1)

_SETTINGS: dict[str, Any] = {
    "image_name": VIT["name"],
    "image_size": 32,
    "in_channels": 3,
    "norm": "batch",
    "image_arguments": VIT["arguments"],
    "image_pretrained": None,
    "vocab_size": 60,
    "max_seq_len": 10,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "dropout": 0.0,
    "projection_size": 24,
    "init_scale": 10.0,
    "init_bias": -10.0,
}


def on_meta(kind: str = "vit", **changes: Any) -> DualEncoder:
    of_images = {"image_name": MODELS[kind]["name"], "image_arguments": MODELS[kind]["arguments"]}
    with torch.device("meta"):
        return DualEncoder(**(_SETTINGS | of_images | changes))


def encoder(kind: str = "vit", *, seed: int = 3, **changes: Any) -> DualEncoder:
    model = on_meta(kind, **changes)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    initialize(model, seed)
    return model


def captions() -> tuple[Tensor, Tensor]:
    """Return four captions of 3, 10, 1 and 7 tokens, padded to 10, and which tokens are no padding."""
    tokens = torch.randint(60, (4, 10), generator=torch.Generator().manual_seed(1))
    return tokens, torch.arange(10) < torch.tensor([[3], [10], [1], [7]])


@pytest.mark.parametrize("kind", MODELS)
def test_every_parameter_has_a_gradient_and_blocks_of_both_towers_are_named(kind: str) -> None:
    model = encoder(kind).train()
    of_images, of_captions, log_scale, bias = model(make_images(), *captions())
    assert of_images.shape == of_captions.shape == (4, 24)
    assert of_images.isfinite().all()
    assert (log_scale.exp().item(), bias.item()) == pytest.approx((10.0, -10.0))
    sum(each.square().sum() for each in (of_images, of_captions, log_scale, bias)).backward()
    # timm's ResNet starts with branches that a norm multiplies by 0
    ends = {id(norm.weight) for name, norm in list_batch_norms(model).items() if name.endswith("bn2")}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        if not ends or id(parameter) in ends or "layer" not in name:
            assert parameter.grad.abs().sum() > 0, name
    towers = named_blocks(model)
    assert [*towers][-1] == "text.blocks"
    assert all(name.startswith("image.inner.") for name in [*towers][:-1])
    assert len(towers) == {"vit": 2, "convnext": 5, "resnet": 5}[kind]


def test_padding_behind_a_caption_changes_no_feature() -> None:
    model, (tokens, is_token) = encoder().eval(), captions()
    _, before, *_ = model(None, tokens, is_token)
    _, after, *_ = model(None, tokens.masked_fill(~is_token, 7), is_token)
    assert torch.equal(before, after)
    _, alone, *_ = model(None, tokens[:1, :3], is_token[:1, :3])
    torch.testing.assert_close(alone, before[:1], rtol=1e-5, atol=1e-6)
    _, shorter, *_ = model(None, tokens, is_token & (torch.arange(10) < 2))
    assert (shorter - before)[[0, 1, 3]].abs().amin(1).gt(0).all(), "the last token is read"
    assert torch.equal(shorter[2], before[2])


def test_features_of_images_are_those_of_timm_without_its_head() -> None:
    model, other = encoder().eval(), theirs("vit", num_classes=0).eval()
    other.load_state_dict(model.image.inner.state_dict())
    of_images, none, *_ = model(make_images(), None, None)
    assert none is None
    torch.testing.assert_close(of_images, other(make_images()) @ model.image_projection.weight.T)


def test_first_weights_follow_the_seed_and_the_names_alone() -> None:
    torch.manual_seed(1)
    one = encoder().state_dict()
    torch.manual_seed(2)
    deeper, other = encoder(num_layers=3, projection_size=25).state_dict(), encoder(seed=4).state_dict()
    for name, values in one.items():
        if values.dim() >= 2 and "projection" not in name and not name.endswith(".out.weight"):
            assert torch.equal(values, deeper[name]), name
            assert not torch.equal(values, other[name]), name
    assert one["text.blocks.1.mlp.out.weight"].std().item() == pytest.approx(0.02 / 2, rel=0.1)
    assert one["text_projection.weight"].std().item() == pytest.approx(32**-0.5, rel=0.1)
    assert one["image_projection.weight"].std().item() == pytest.approx(48**-0.5, rel=0.1)


def test_a_model_without_a_bias_has_a_scale_up_to_a_hundred() -> None:
    model = encoder(init_bias=None, init_scale=100.0)
    assert "logit_bias" not in dict(model.named_parameters())
    assert model.bounds() == {"logit_scale": (0.0, math.log(100.0))}
    assert encoder().bounds() == {}
    *_, log_scale, bias = model(None, *captions())
    assert (log_scale.shape, bias.tolist()) == ((1,), [0.0])


@pytest.mark.parametrize(("kind", "norm"), [("resnet", "sync"), ("resnet", "group"), ("resnet", "frozen")])
def test_norms_of_the_image_tower_are_replaced(kind: str, norm: str) -> None:
    assert list_batch_norms(encoder(kind))
    model = encoder(kind, norm=norm).eval()
    assert not list_batch_norms(model)
    assert model(make_images(), None, None)[0].isfinite().all()


def test_published_weights_fill_the_image_tower_and_nothing_else(tmp_path: Path) -> None:
    whole = small("vit")  # with a head of ten classes
    save_weights(whole.inner, tmp_path)
    file = str(tmp_path / "model.safetensors")
    fresh, model = encoder(), encoder(image_pretrained=file)
    for name, values in whole.inner.state_dict().items():
        if not name.startswith("head."):
            assert torch.equal(model.image.inner.state_dict()[name], values), name
    for name, values in model.state_dict().items():
        if not name.startswith("image."):
            assert torch.equal(values, fresh.state_dict()[name]), name


def test_errors_about_the_image_model_name_the_settings_of_this_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.image_name=resnet19: .* type model\.image_name=resnet1"):
        on_meta(image_name="resnet19")
    with pytest.raises(ConfigError, match=r"without the argument of model\.image_arguments that it does not take"):
        on_meta(image_arguments={"dept": 3})
    with pytest.raises(ConfigError, match=r"model\.num_heads=5: .* type model\.hidden_size=35"):
        on_meta(num_heads=5)
    with pytest.raises(ConfigError, match=r"model\.image_pretrained=/nowhere"):
        encoder(image_pretrained="/nowhere")
    save_weights(small("convnext").inner, tmp_path)
    with pytest.raises(ConfigError, match=r"image_name=vit_tiny_patch16_224 model\.image_pretrained=.*cannot fit"):
        encoder(image_pretrained=str(tmp_path / "model.safetensors"))
    with pytest.raises(ConfigError, match=r"model\.norm=group model\.image_pretrained=.*; type model\.norm=frozen"):
        encoder("resnet", norm="group", image_pretrained=str(tmp_path / "model.safetensors"))


def test_an_export_has_a_layout_of_its_own_and_loads_bit_for_bit(tmp_path: Path) -> None:
    model, again = encoder(), encoder(seed=9)
    assert why_no_format(model) is not None
    save_weights(model, tmp_path)
    load_weights(again, tmp_path, setting="load(…)", fix="load(…)")
    for name, values in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], values), name


def test_a_checkpoint_that_follows_needs_no_first_weights_but_the_statistics() -> None:
    model = on_meta("resnet")
    model.to_empty(device="cpu")
    await_checkpoint(model, 0)
    assert all(parameter.isnan().all() for parameter in model.parameters())
    assert all(buffer.isfinite().all() for buffer in model.buffers())


def test_flops_are_those_of_all_products_of_both_towers() -> None:
    model = on_meta()
    of_images = 2 * 12 * 48**2 * 17 + 17**2 * 2 * 2 * 48 + 24 * 48  # multiply-adds; 16 patches and a class token
    of_captions = 2 * 12 * 32**2 * 10 + 10**2 * 2 * 2 * 32 + 24 * 32
    flops = flops_per_sample(model, (3, 32, 32))
    assert flops is not None
    assert flops.palm == 6 * (of_images + of_captions) + 4 * 48 * 192 * 16  # no gradient of pixels
    assert flops.palm - flops.causal == 6 * 10**2 * 2 * 32
    for parameter in model.image.parameters():
        parameter.requires_grad_(False)
    frozen = flops_per_sample(model, (3, 32, 32))
    assert frozen is not None
    # of the frozen tower the forward pass alone; of its projection the weight gradient, too
    assert frozen.palm == 6 * of_captions + 2 * of_images + 2 * 24 * 48 + 2 * 48 * 192 * 16
    assert flops_per_sample(encoder(), (3, 32, 32)) is None


def test_layers_end_together_and_position_embeddings_of_timm_are_not_decayed() -> None:
    model = on_meta(num_layers=3)
    numbers = model.number_layers()
    assert numbers.keys() == dict(model.named_parameters()).keys()
    assert numbers["text.embedding.weight"] == 0
    assert numbers["text.blocks.2.mlp.up.weight"] == numbers["image.inner.blocks.1.mlp.fc1.weight"] == 3
    assert numbers["image.inner.pos_embed"] == 1
    assert numbers["image_projection.weight"] == numbers["logit_scale"] == 4
    decayed = find_decayed(model)
    assert model.image.inner.pos_embed not in decayed
    assert model.logit_scale not in decayed
    assert model.text.embedding.weight in decayed


def test_the_size_of_images_is_given_to_models_that_depend_on_it() -> None:
    assert on_meta(image_size=48).image.inner.patch_embed.num_patches == 36
    for kind in (CONVNEXT, RESNET):
        on_meta(image_name=kind["name"], image_arguments=kind["arguments"], image_size=48)
