"""Initial weights depend only on seed, name and shape."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from recipes.model.gpt2 import GPT2
from recipes.model.init import fill, generator_for, named_parameters, normal_
from recipes.model.llama import Llama
from recipes.model.resnet import ResNet18
from recipes.model.weights import await_checkpoint, initialize

torch.set_num_threads(1)


def small(**changes: object) -> GPT2:
    settings = {
        "vocab_size": 100,
        "max_seq_len": 16,
        "num_layers": 2,
        "num_heads": 4,
        "hidden_size": 32,
        "dropout": 0.0,
    }
    return GPT2(**(settings | changes))  # type: ignore[arg-type]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in named_parameters(model)}


def test_equal_seed_and_name_give_equal_values_and_any_difference_gives_others() -> None:
    def draw(name: str, seed: int) -> torch.Tensor:
        return torch.randn(8, generator=generator_for(name, seed=seed))

    assert torch.equal(draw("a", 1), draw("a", 1))
    assert not torch.equal(draw("a", 1), draw("b", 1))
    assert not torch.equal(draw("a", 1), draw("a", 2))
    # Pinned: a change of the rule would change every run that is repeated from its seed.
    assert generator_for("blocks.0.mlp.up.weight", seed=1234).initial_seed() == 926403507


def test_a_deeper_model_has_the_initial_weights_of_a_shallow_one() -> None:
    shallow, deep = small(num_layers=2), small(num_layers=3)
    shallow.init_weights(7)
    torch.manual_seed(99)  # the global generator has no say
    deep.init_weights(7)
    deeper = weights(deep)
    for name, values in weights(shallow).items():
        scale = math.sqrt(3 / 2) if name.endswith(".out.weight") else 1.0
        torch.testing.assert_close(values, deeper[name] * scale, rtol=1e-6, atol=0)


def test_padding_changes_no_row_that_existed() -> None:
    padded, plain = small(vocab_pad_multiple=64), small(vocab_pad_multiple=1)
    for model in (padded, plain):
        model.init_weights(7)
    assert torch.equal(padded.embedding.weight[:100], plain.embedding.weight)
    assert torch.equal(padded.embedding.weight[100:], torch.zeros(28, 32))


def test_every_parameter_has_the_spread_it_is_given() -> None:
    model = small(hidden_size=256, num_layers=2)
    model.init_weights(0)
    for name, values in weights(model).items():
        if values.dim() == 1:
            expected = 0.0 if name.endswith("bias") else 1.0
            assert torch.equal(values, torch.full_like(values, expected)), name
            continue
        std = 0.02 / 2.0 if name.endswith(".out.weight") else 0.02  # sqrt(2 L) = 2
        real = values[:100] if name == "embedding.weight" else values
        # The spread of n draws is known to 1 / sqrt(2 n), 1.1 % for the smallest of 4096: 5 sigma.
        assert real.std().item() == pytest.approx(std, rel=0.055), name


def test_wrapped_blocks_have_the_initial_weights_of_plain_blocks() -> None:
    plain, wrapped = small(), small()
    for index, block in enumerate(wrapped.blocks):
        wrapped.blocks[index] = torch.compile(block, backend="eager")  # type: ignore[assignment]
    plain.init_weights(0)
    wrapped.init_weights(0)
    assert "blocks.0._orig_mod.mlp.up.weight" in dict(wrapped.named_parameters())
    for name, values in weights(plain).items():
        assert torch.equal(values, weights(wrapped)[name]), name


def test_bfloat16_parameters_are_the_rounded_float32_ones() -> None:
    wide = torch.empty(64, 64)
    narrow = torch.empty(64, 64, dtype=torch.bfloat16)
    for parameter in (wide, narrow):
        normal_(parameter, name="x", seed=0, std=0.02)
    assert torch.equal(wide.bfloat16(), narrow)


def test_a_sharded_model_has_the_initial_weights_of_the_unsharded_one(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        with torch.device("meta"):
            model = small()
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        initialize(model, seed=3)
        assert model.head.weight is model.embedding.weight
        whole = small()
        initialize(whole, seed=3)
        for name, parameter in named_parameters(model):
            assert isinstance(parameter, DTensor)
            assert torch.equal(parameter.full_tensor(), weights(whole)[name]), name
        inputs = torch.arange(16)[None]
        assert torch.equal(model(inputs), whole(inputs))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 2])
def test_each_of_three_ranks_fills_its_own_rows_without_a_collective(rank: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
    try:
        mesh = dist.init_device_mesh("cpu", (3,))
        parameter = distribute_tensor(torch.zeros(10, 4), mesh, [Shard(0)], src_data_rank=None)
        values = torch.arange(40.0).view(10, 4)
        fill(parameter, values)  # the fake group answers a collective with garbage
        assert torch.equal(parameter.to_local(), values.chunk(3)[rank])  # 4, 4 and 2 rows
    finally:
        dist.destroy_process_group()


def test_where_a_checkpoint_follows_nothing_is_drawn_and_nothing_stays_undefined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a load left out is NaN, so that the first loss is: never a number from undefined memory."""
    settings = {"vocab_size": 100, "max_seq_len": 16, "num_layers": 2, "num_heads": 4, "hidden_size": 32}
    monkeypatch.setattr(torch, "randn", None)
    with torch.device("meta"):
        models = [
            small(),
            Llama(**settings, num_kv_heads=2, ffn_hidden_size=48, rope_theta=1e4),  # type: ignore[arg-type]
            ResNet18(num_classes=10, in_channels=1, small_images=True),
        ]
    for model in models:
        model.to_empty(device="cpu")
        for tensor in model.state_dict().values():
            tensor.fill_(7)
        await_checkpoint(model, 0)
        assert all(parameter.isnan().all() for parameter in model.parameters())
    llama, resnet = models[1:]
    assert torch.equal(llama.rope_cos[0], torch.ones_like(llama.rope_cos[0])), "the rotary tables are no parameters"
    buffers = dict(resnet.named_buffers())
    assert {float(value.float().mean()) for value in buffers.values()} == {0.0, 1.0}, "running means and variances"
