"""AdamW with moments of 8 bits against torch's AdamW, its codes, its checkpoints, and on shards as on one device."""

import copy
from typing import Any

import pytest
import torch
from thread_ranks import LAYOUTS, run_on_threads, train
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from recipes.optimizer import adamw_8bit
from recipes.optimizer.adamw_8bit import BLOCK, AdamW8bit

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def make(model: nn.Module) -> AdamW8bit:
    return AdamW8bit(model, **SETTINGS)


def make_float32(model: nn.Module) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, **SETTINGS)


def make_layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 128)


def step_with(optimizer: torch.optim.Optimizer, layer: nn.Linear, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        # elements differ by decades, as those of a model do
        scale = 10 ** (-3 * torch.rand(parameter.shape, generator=generator))
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale
    optimizer.step()


def write_and_read(values: Tensor, name: str) -> Tensor:
    state: dict[str, Any] = {
        f"{name}_codes": torch.empty(len(values), dtype=torch.uint8),
        f"{name}_scales": torch.empty(-(-len(values) // BLOCK)),
    }
    optimizer = make(make_layer())
    optimizer._write(state, name, slice(0, len(values)), values)
    return optimizer._read(state, name)


@pytest.mark.parametrize(("name", "worst"), [("exp_avg", 0.9 / 64 / 2), ("exp_avg_sq", 0.9 / 128 / 2)])
def test_a_value_is_off_by_half_an_interval_of_its_decade(name: str, worst: float) -> None:
    values = torch.linspace(0.0 if name == "exp_avg_sq" else -1.0, 1.0, 20 * BLOCK)
    values[::BLOCK] = 1.0
    errors = (write_and_read(values, name) - values).abs()
    assert errors.max() <= worst * 1.001
    assert errors[values.abs() < 0.009].max() <= worst * 0.01 * 4 * 1.001  # a lower decade has half the intervals


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_what_was_read_is_written_as_the_same_codes(name: str) -> None:
    torch.manual_seed(0)
    values = torch.randn(1000) * 10 ** (-8 * torch.rand(1000))
    values[:BLOCK] = 0.0
    values[BLOCK] = -50.0  # the largest of a block may be negative
    values = values.abs() if name == "exp_avg_sq" else values
    once = write_and_read(values, name)
    assert torch.equal(write_and_read(once, name), once)
    assert torch.equal(once[:BLOCK], torch.zeros(BLOCK))
    assert once[BLOCK] == values[BLOCK]


def test_the_first_step_is_that_of_adamw_and_later_ones_stay_near() -> None:
    layer, other = make_layer(), make_layer()
    optimizer, reference = make(layer), make_float32(other)
    before = other.weight.detach().clone()
    for seed in range(30):
        step_with(optimizer, layer, seed=seed)
        step_with(reference, other, seed=seed)
        if seed == 0:  # the moments are rounded after the step
            torch.testing.assert_close(layer.weight, other.weight, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(layer.bias, other.bias, rtol=1e-5, atol=1e-7)  # 128 elements stay float32
    moved, difference = (other.weight - before).norm(), (layer.weight - other.weight).norm()
    assert 0 < difference < 0.05 * moved


def test_state_is_two_bytes_an_element_and_two_scales_a_block() -> None:
    layer = make_layer()
    optimizer = make(layer)
    step_with(optimizer, layer, seed=0)
    kept = [value for value in optimizer.state[layer.weight].values() if isinstance(value, Tensor)]
    assert sum(value.numel() * value.element_size() for value in kept) == 2 * 64 * 128 + 2 * 4 * 64 * 128 / BLOCK
    assert optimizer.state[layer.bias]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("saves", ["AdamW8bit", "AdamW"])
@pytest.mark.parametrize("loads", ["AdamW8bit", "AdamW"])
def test_each_loads_the_others_state(saves: str, loads: str) -> None:
    makers = {"AdamW8bit": make, "AdamW": make_float32}
    layer, other = make_layer(), make_layer()
    saving, loading = makers[saves](layer), makers[loads](other)
    for seed in range(3):
        step_with(saving, layer, seed=seed)
    other.load_state_dict(layer.state_dict())
    loading.load_state_dict(copy.deepcopy(saving.state_dict()))
    saved, loaded = (optimizer.state_dict()["state"] for optimizer in (saving, loading))
    for index, values in saved.items():
        assert loaded[index].keys() == values.keys()
        for name, value in values.items():
            if "AdamW8bit" in (saves, loads) and saves != "AdamW8bit":
                scale = value.abs().max() if value.ndim else 0.0
                assert (loaded[index][name] - value).abs().max() <= scale * 0.9 / 64 / 2
            else:
                assert torch.equal(loaded[index][name], value)
    step_with(loading, other, seed=9)
    step_with(saving, layer, seed=9)
    if saves == loads:
        assert torch.equal(layer.weight, other.weight)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_of_any_number_of_rows_step_on_shards_as_on_one_device(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adamw_8bit, "_MIN_ELEMENTS", 0)
    expected, _ = train(make)
    for found, _ in run_on_threads(lambda rank: train(make, layout)):
        for one, other in zip(found, expected, strict=True):
            # blocks begin at the rows of a rank, so that scales differ: three steps of 0.01 each, a few percent off
            torch.testing.assert_close(one, other, rtol=0, atol=0 if layout == "ddp" else 3e-3)


def test_shards_of_whole_blocks_step_with_the_bits_of_one_device() -> None:
    layer = make_layer()
    optimizer = make(layer)
    for seed in range(3):
        step_with(optimizer, layer, seed=seed)

    def run(rank: int) -> tuple[Tensor, Tensor]:
        mesh = init_device_mesh("cpu", (4,))
        sharded = nn.Linear(64, 128)
        full = make_layer_on(sharded)
        for name, value in full.items():
            setattr(sharded, name, nn.Parameter(distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)))
        own = make(sharded)
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            for name, value in full.items():
                scale = 10 ** (-3 * torch.rand(value.shape, generator=generator))
                grad = torch.randn(value.shape, generator=generator) * scale
                getattr(sharded, name).grad = distribute_tensor(grad, mesh, [Shard(0)], src_data_rank=None)
            own.step()
        saved = own.state_dict()["state"][0]["exp_avg"]
        assert isinstance(saved, DTensor)
        return sharded.weight.full_tensor().detach(), saved.full_tensor()  # type: ignore[attr-defined]

    initial = {name: value.detach().clone() for name, value in make_layer().named_parameters()}

    def make_layer_on(sharded: nn.Linear) -> dict[str, Tensor]:
        return {name: initial[name] for name, _ in sharded.named_parameters()}

    for weight, average in run_on_threads(run):
        assert torch.equal(weight, layer.weight)
        assert torch.equal(average, optimizer.state_dict()["state"][0]["exp_avg"])


@pytest.mark.parametrize("ratio", [1e3, 3e3, 1e4])
def test_a_column_of_large_gradients_leaves_the_steps_of_its_block_small(ratio: float) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(256, 256, bias=False)
    optimizer = AdamW8bit(layer, **SETTINGS | {"lr": 1e-3, "weight_decay": 0.0})
    for step in range(20):
        before = layer.weight.detach().clone()
        layer.weight.grad = torch.randn(256, 256)
        layer.weight.grad[:, 0] *= ratio
        optimizer.step()
        # a first moment of either sign over the root of at least as large a second one; AdamW's largest is 1.0
        assert (layer.weight - before).abs().max() <= 3e-3, step
