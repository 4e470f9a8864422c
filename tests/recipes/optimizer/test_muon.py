"""Muon against torch's two optimizers, on shards and replicas as on one device, and each rank does its share."""

import copy
import math
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from support import composed_config
from thread_ranks import LAYOUTS, NUM_RANKS, Net, run_on_threads, train
from torch import Tensor, nn
from torch.optim import _muon

from recipes.config.instantiate import make as instantiate
from recipes.errors import ConfigError
from recipes.model.gpt2 import GPT2
from recipes.model.resnet import ResNet18
from recipes.optimizer import DividesWork, muon
from recipes.optimizer.muon import Muon, orthogonalize


def make(model: nn.Module, *, adamw_lr: float | None = None) -> Muon:
    return Muon(
        model,
        lr=1e-2,
        adamw_lr=adamw_lr,
        momentum=0.95,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
    )


def test_hidden_matrices_step_as_torchs_muon_and_the_rest_as_torchs_adamw() -> None:
    torch.manual_seed(0)
    model, other = Net(), Net()
    for net in (model, other):
        for layer in net.blocks:
            del layer.conv, layer.qkv  # which torch cannot step, and would not take apart
    hidden = [parameter for parameter in other.blocks.parameters() if parameter.ndim == 2]
    biases = [parameter for parameter in other.blocks.parameters() if parameter.ndim == 1]
    torchs = [
        torch.optim.Muon(hidden, lr=1e-2, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(other.embedding.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1),
        torch.optim.AdamW(biases, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    optimizer = make(_without_stacks(model))
    optimizer.product_dtype = torch.bfloat16  # torch's
    for _ in range(4):
        for one, another in zip(model.parameters(), other.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            another.grad = one.grad.clone()
        for each in (optimizer, *torchs):
            each.step()
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        # updates of four steps, of up to 1e-2 x 0.2 x sqrt(7) each, in bfloat16
        torch.testing.assert_close(one, another, rtol=0, atol=4e-4 if one.ndim == 2 else 1e-6)


def _without_stacks(model: nn.Module) -> nn.Module:
    for layer in model.blocks:  # type: ignore[union-attr]
        layer.stacked_rows = dict
    return model


def test_a_step_follows_the_formula() -> None:
    model = Net()
    weight = model.blocks[0].up.weight  # [3, 7]
    before, grad = weight.detach().clone(), torch.randn(3, 7)
    optimizer = make(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    weight.grad = grad
    optimizer.step()
    momentum = 0.05 * grad
    direction = orthogonalize(0.05 * grad + 0.95 * momentum)
    expected = before * (1 - 1e-2 * 0.1) - 1e-2 * 0.2 * math.sqrt(7) * direction
    torch.testing.assert_close(weight.detach(), expected)
    torch.testing.assert_close(optimizer.state[weight]["momentum_buffer"], momentum)


def test_queries_keys_and_values_are_orthogonalized_one_by_one() -> None:
    model = GPT2(vocab_size=64, max_seq_len=8, num_layers=1, num_heads=2, hidden_size=16, dropout=0.0)
    weight = model.blocks[0].attention.qkv.weight  # [48, 16]
    before = weight.detach().clone()
    optimizer = Muon(model, lr=1.0, adamw_lr=None, momentum=0.9, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    # together with the keys, queries and values would hardly move
    parts = [scale * nn.init.orthogonal_(torch.empty(16, 16)) for scale in (1.0, 1000.0, 1.0)]
    weight.grad = torch.cat(parts)
    optimizer.step()
    for part in (before - weight.detach()).split(16):
        values = torch.linalg.svdvals(part) / (0.2 * math.sqrt(16))
        assert values.min() > 0.65
        assert values.max() < 1.25


def _make_elementwise(model: nn.Module) -> Muon:
    """Return the optimizer without AdamW's fused kernel, which rounds the last few elements of a shard otherwise."""
    optimizer = make(model)
    for group in optimizer.param_groups[1:]:
        group["fused"] = False
    return optimizer


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_and_replicas_give_the_bits_of_one_device(layout: str) -> None:
    """The same products of the same matrices, wherever they are computed."""
    expected, _ = train(_make_elementwise)
    for found, _ in run_on_threads(lambda rank: train(_make_elementwise, layout)):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_orthogonalizes_its_share_of_the_matrices(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_rank: Counter[int] = Counter()

    def count(matrix: Tensor) -> Tensor:
        by_rank[dist.get_rank()] += 1
        return orthogonalize(matrix)

    monkeypatch.setattr(muon, "orthogonalize", count)
    run_on_threads(lambda rank: train(make, layout, num_steps=1))
    # 8 parameters, 2 of which are three matrices
    assert sum(by_rank.values()) == 12
    assert set(by_rank) == set(range(NUM_RANKS))


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_a_step_without_gradients_changes_nothing_and_waits_for_nobody(layout: str | None) -> None:
    expected, _ = train(make, num_steps=1)

    def run(rank: int) -> list[Tensor]:
        return train(make, layout, num_steps=2, skips=1)[0]

    for found in [run(0)] if layout is None else run_on_threads(run):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_each_group_has_its_weight_decay_and_learning_rate() -> None:
    model = Net()
    optimizer = make(model, adamw_lr=3e-3)
    found = {group["group_name"]: group for group in optimizer.param_groups}
    assert list(found) == ["hidden", "decay", "no_decay"]
    assert [group["lr"] for group in found.values()] == [1e-2, 3e-3, 3e-3]
    assert [group["weight_decay"] for group in found.values()] == [0.1, 0.1, 0.0]
    assert [parameter is model.embedding.weight for parameter in found["decay"]["params"]] == [True]
    assert all(parameter.ndim == 1 for parameter in found["no_decay"]["params"])
    assert sum(len(group["params"]) for group in found.values()) == len(list(model.parameters()))


def test_a_loaded_state_continues_where_it_was_saved() -> None:
    models = [Net(), Net()]
    optimizers = [make(model) for model in models]

    def step(number: int) -> None:
        for parameter in models[number].parameters():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
        optimizers[number].step()

    step(0)
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for number in (0, 1):
        step(number)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_kernels_of_a_convolution_are_matrices() -> None:
    model = ResNet18(num_classes=10, in_channels=1, small_images=True)
    node = composed_config("model=resnet18", "optimizer=muon")["optimizer"]
    hidden = instantiate(node)(model).param_groups[0]
    assert len(hidden["params"]) == 19  # 16 convolutions in 8 blocks, 3 shortcuts
    assert hidden["momentum"] == node["momentum"]


def test_a_model_without_matrices_in_blocks_is_rejected() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(ConfigError) as raised:
        make(model)
    assert str(raised.value) == (
        "optimizer=muon: it orthogonalizes the matrices of a model's blocks, and Module has no `blocks`;"
        " type optimizer=adamw"
    )


def test_engines_recognize_it() -> None:
    assert isinstance(make(Net()), DividesWork)
    assert not isinstance(torch.optim.SGD([torch.zeros(1)], lr=0.1), DividesWork)


@pytest.mark.parametrize("shape", [(32, 32), (16, 48), (48, 16), (1, 7)])
def test_singular_values_come_near_one_and_singular_vectors_stay(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    left, values, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    values = torch.logspace(0, -2, len(values))  # 1 to 0.01
    found = orthogonalize(left @ torch.diag(values) @ right)
    assert found.shape == shape
    inner = left.mT @ found @ right.mT  # singular vectors stay: this is diagonal
    diagonal = inner.diagonal()
    assert diagonal.min() > 0.6
    assert diagonal.max() < 1.3
    torch.testing.assert_close(inner, torch.diag(diagonal), rtol=0, atol=2e-4)  # noise, amplified up to 3.44^5 = 485


@pytest.mark.parametrize("shape", [(16, 48), (48, 16)])
def test_in_bfloat16_it_is_torchs(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    coefficients = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)
    expected = _muon._zeropower_via_newtonschulz(matrix, coefficients, 5, 1e-7)
    # torch rounds the norm to bfloat16 as it sums, this one at the end: 2^-9 at most, and the slope is below 1 there
    torch.testing.assert_close(orthogonalize(matrix.bfloat16()), expected, rtol=0, atol=2e-2)


def test_a_matrix_of_zeros_stays_one() -> None:
    assert not orthogonalize(torch.zeros(4, 3)).any()
