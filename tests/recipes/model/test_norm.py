"""What stands in the place of batch norm: statistics of all ranks, of groups of channels, and those that stay."""

from typing import Any

import pytest
import torch
from thread_ranks import run_on_threads
from timm_models import make_images, small
from torch import nn

from recipes.errors import ConfigError
from recipes.model.norm import Norm, describe_ghosts, join_ranks, replace_batch_norms
from recipes.model.resnet import ResNet18
from recipes.model.weights import initialize

torch.set_num_threads(1)


def convolutions(norm: Norm = "batch", *, momentum: float | None = 0.1) -> nn.Sequential:
    """Return two convolutions with norms in float64, in which every difference above 1e-12 is a mistake."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8, momentum=momentum), nn.ReLU(), nn.Conv2d(8, 48, 3),
        nn.BatchNorm2d(48, momentum=momentum),
    ).double()  # fmt: skip
    nn.init.normal_(model[1].weight)  # type: ignore[arg-type]
    replace_batch_norms(model, norm)
    return model


@pytest.mark.parametrize("norm", ["sync", "group", "frozen"])
def test_parameters_keep_their_names_and_a_model_without_batch_norm_is_refused(norm: Norm) -> None:
    names = [name for name, _ in convolutions().named_parameters()]
    assert [name for name, _ in convolutions(norm).named_parameters()] == names
    with pytest.raises(ConfigError, match=rf"model\.norm={norm}: .* has no batch norm to replace"):
        replace_batch_norms(nn.Sequential(nn.Linear(2, 2)), norm)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_sync_norm_of_one_rank_is_batch_norm(momentum: float | None) -> None:
    ours, theirs = (convolutions(norm, momentum=momentum) for norm in ("sync", "batch"))  # type: ignore[arg-type]
    images = make_images(size=9).double()
    for model in (ours, theirs):
        for _ in range(2):
            model(images).pow(3).sum().backward()
    for (name, value), (_, other) in zip(_tensors(ours), _tensors(theirs), strict=True):
        assert torch.allclose(value, other, rtol=1e-10, atol=1e-12), name
    assert torch.allclose(ours.eval()(images), theirs.eval()(images), rtol=1e-12)


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    gradients = [(name, value.grad) for name, value in model.named_parameters() if value.grad is not None]
    return [*gradients, *model.named_buffers()]


def test_sync_norm_takes_weights_in_bfloat16_as_batch_norm_does() -> None:
    images = make_images(size=9).bfloat16()
    ours, theirs = (convolutions(norm).bfloat16() for norm in ("sync", "batch"))  # type: ignore[arg-type]
    outputs = [model(images) for model in (ours, theirs)]
    assert torch.allclose(*outputs, rtol=0.02, atol=0.02)
    for out in outputs:
        out.sum().backward()
    for (name, value), (_, other) in zip(_tensors(ours), _tensors(theirs), strict=True):
        assert value.dtype == other.dtype, name


def test_sync_norm_in_bfloat16_computes_its_statistics_in_float32() -> None:
    images = (make_images(64, size=16) * 0.1 + 100.0).bfloat16()
    norm = nn.BatchNorm2d(3)
    holder = nn.Sequential(norm)
    replace_batch_norms(holder, "sync")
    out = holder(images)
    assert out.dtype == torch.bfloat16
    exact = images.double()
    expected = exact.var((0, 2, 3)) * 0.1 + 0.9
    assert torch.allclose(holder[0].running_var.double(), expected, rtol=1e-5)


def test_group_norm_takes_32_groups_or_the_most_that_divide_the_channels() -> None:
    model, images = convolutions("group"), make_images(size=9).double()
    x = model[0](images)
    assert torch.equal(model[1](x), nn.functional.group_norm(x, 8, model[1].weight, model[1].bias))
    y = torch.randn(2, 48, 3, 3).double()
    assert torch.equal(model[4](y), nn.functional.group_norm(y, 24, model[4].weight, model[4].bias))
    assert not [*model.buffers()]
    # an image's output does not depend on the others, so accumulation and ranks change nothing
    assert torch.allclose(model(images)[:1], model(images[:1]))


def test_frozen_norm_keeps_its_statistics_and_trains_its_weights() -> None:
    model, images = convolutions("frozen").train(), make_images(size=9).double()
    before = {name: value.clone() for name, value in model.named_buffers()}
    out = model(images)
    out.sum().backward()
    assert all(torch.equal(before[name], value) for name, value in model.named_buffers())
    assert torch.equal(out, convolutions().eval()(images))
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_timm_does_after_a_norm_is_done_after_the_other_one() -> None:
    settings = {"name": "mobilenetv3_small_050", "arguments": {}}  # its norms hold the activation
    images = make_images()
    plain, frozen = small("resnet", **settings), small("resnet", norm="frozen", **settings)
    assert plain.state_dict().keys() == frozen.state_dict().keys()
    assert torch.equal(plain.eval()(images), frozen.train()(images))


def test_both_kinds_of_resnet_have_the_setting() -> None:
    for norm in ("sync", "group", "frozen"):
        with torch.device("meta"):
            own = ResNet18(num_classes=10, in_channels=1, small_images=True, norm=norm)  # type: ignore[arg-type]
        own.to_empty(device="cpu")
        initialize(own, seed=0)
        assert own(make_images(2, channels=1, size=8)).isfinite().all()
        assert small("resnet", norm=norm)(make_images()).isfinite().all()
        counts = [value for name, value in own.named_buffers() if name.endswith("tracked")]
        assert [int(count) for count in counts] == (
            [1] * 20 if norm == "sync" else [0] * 20 if norm == "frozen" else []
        )


def test_four_ranks_give_the_gradients_and_statistics_of_one_device_with_the_whole_batch() -> None:
    images, whole = make_images(8, size=9).double(), convolutions("batch")
    models = [convolutions("sync") for _ in range(4)]  # here: threads share the generator that draws the weights
    for _ in range(2):
        loss = whole(images).pow(3).sum()
        loss.backward()

    def on_rank(rank: int) -> Any:
        model = models[rank]
        join_ranks(model, None)
        for _ in range(2):
            part = model(images[2 * rank : 2 * rank + 2]).pow(3).sum()
            part.backward()
        return part.detach(), [parameter.grad for parameter in model.parameters()], [*model.buffers()]

    ranks = run_on_threads(on_rank)
    assert torch.allclose(torch.stack([part for part, _, _ in ranks]).sum(), loss, rtol=1e-12)
    for index, (name, parameter) in enumerate(whole.named_parameters()):
        summed = torch.stack([gradients[index] for _, gradients, _ in ranks]).sum(0)
        assert torch.allclose(summed, parameter.grad, rtol=1e-9, atol=1e-9), name
    for _, _, buffers in ranks:
        for buffer, expected in zip(buffers, whole.buffers(), strict=True):
            assert torch.allclose(buffer, expected, rtol=1e-12)
    # the control: the statistics of each rank alone are others
    alone = torch.stack([convolutions()(part).pow(3).sum() for part in images.split(2)]).sum()
    assert not torch.allclose(alone, loss, rtol=1e-2)


def test_statistics_of_a_part_of_a_step_are_named_with_what_to_type() -> None:
    of_step = {"micro_batch_size": 4, "num_ranks": 2, "global_batch_size": 16}
    found = describe_ghosts(convolutions(), **of_step)
    assert found == (
        "batch norm: statistics of 4 of the 16 samples of a step; model.norm=sync takes those of all ranks,"
        " micro_batch_size=8 those of the step on a rank, model.norm=group none"
    )
    found = describe_ghosts(convolutions("sync"), **of_step)
    assert found is not None
    assert found.startswith("batch norm: statistics of 8 of the 16 samples of a step; micro_batch_size=8")
    assert describe_ghosts(convolutions("sync"), **of_step | {"micro_batch_size": 8}) is None
    assert describe_ghosts(convolutions(), **of_step | {"micro_batch_size": 16, "num_ranks": 1}) is None
    for norm in ("group", "frozen"):
        assert describe_ghosts(convolutions(norm), **of_step) is None  # type: ignore[arg-type]
