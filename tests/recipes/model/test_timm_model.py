"""Models of timm: timm's outputs, gradients and layers, whatever device they are constructed on."""

from typing import Any

import pytest
import torch
from timm_models import MODELS, make_images, small, theirs

from recipes.blocks import list_blocks
from recipes.compile import compile_blocks
from recipes.errors import ConfigError
from recipes.optimizer.param_groups import decay_groups
from recipes.optimizer.rules import apply_rules, make_optimizer

torch.set_num_threads(1)


@pytest.mark.parametrize("kind", MODELS)
def test_outputs_and_gradients_are_those_of_timm_with_the_same_weights(kind: str) -> None:
    model, other, images = small(kind).train(), theirs(kind).train(), make_images()
    other.load_state_dict(model.inner.state_dict())
    for each in (model, other):
        each(images).square().sum().backward()
    assert torch.equal(model(images), other(images))
    for (name, parameter), (_, expected) in zip(model.inner.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad), name
    for (name, buffer), (_, expected) in zip(model.inner.named_buffers(), other.named_buffers(), strict=True):
        assert torch.equal(buffer, expected), name


def test_initial_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    one = small("vit").state_dict()
    torch.manual_seed(2)
    state = torch.get_rng_state()
    other = small("vit").state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert one["inner.blocks.0.attn.qkv.weight"].std() > 0.01


@pytest.mark.parametrize("kind", MODELS)
def test_blocks_are_those_of_the_stages(kind: str) -> None:
    expected = {
        "vit": ["inner.blocks"],
        "convnext": [f"inner.stages.{stage}.blocks" for stage in range(4)],
        "resnet": [f"inner.layer{stage}" for stage in range(1, 5)],
    }
    towers = small(kind).named_blocks()
    assert list(towers) == expected[kind]
    assert [len(tower) for tower in towers.values()] == {"vit": [2], "convnext": [1, 1, 2, 1], "resnet": [2] * 4}[kind]


@pytest.mark.parametrize("kind", MODELS)
def test_layer_decay_makes_the_groups_of_timm(kind: str) -> None:
    from timm.optim import param_groups_layer_decay

    model: Any = small(kind)
    apply_rules(model, freeze=[], groups=[], layer_decay=0.7)
    optimizer = make_optimizer(
        model, construct=lambda model: torch.optim.AdamW(decay_groups(model, weight_decay=0.05), lr=1.0)
    )
    exempt = getattr(model.inner, "no_weight_decay", set)()
    expected = {
        parameter: (group["lr_scale"], group["weight_decay"])
        for group in param_groups_layer_decay(
            model.inner, weight_decay=0.05, layer_decay=0.7, no_weight_decay_list=exempt
        )
        for parameter in group["params"]
    }
    found = {
        parameter: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert found == expected
    assert len({*found.values()}) >= 8
    assert optimizer.param_groups[0]["lr"] == 1.0
    if kind == "vit":  # tables of three axes
        assert found[model.inner.pos_embed][1] == found[model.inner.cls_token][1] == 0.0


def test_a_setting_that_the_model_does_not_take_is_named() -> None:
    with pytest.raises(ConfigError, match=r"model\.name=resnet19: .* no such model.*resnet1"):
        small("resnet", name="resnet19")
    with pytest.raises(ConfigError, match=r"timm does not construct it with .*dept=3"):
        small("vit", arguments={"dept": 3})
    with pytest.raises(ConfigError, match=r"model\.arguments=\{drop_rate: …\}.*model\.dropout=0\.1"):
        small("vit", arguments={"drop_rate": 0.1})
    with pytest.raises(ConfigError, match=r"model\.norm=sync: vit_tiny_patch16_224 has no batch norm"):
        small("vit", norm="sync")


@pytest.mark.slow
def test_compiled_blocks_of_two_sizes_compute_the_same() -> None:
    plain, compiled = (small("convnext").train() for _ in range(2))
    # with sizes that become dynamic, inductor fails at the second one
    compile_blocks(list_blocks(compiled)[:2], mode="default", has_fixed_shapes=True)
    for each in (plain, compiled):
        each(make_images()).square().mean().backward()
    for (name, parameter), (_, other) in zip(plain.named_parameters(), compiled.named_parameters(), strict=True):
        assert torch.allclose(parameter.grad, other.grad, rtol=1e-4, atol=1e-6), name
