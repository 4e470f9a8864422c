"""A Llama with experts against a loop over experts; its weights, FLOPs, buffers and choices."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from one_text import generate
from support import ROOT
from torch import Tensor

from recipes.activation_checkpoint import ActivationCheckpoint
from recipes.errors import ConfigError
from recipes.model.moe.llama import MoeLlama, MoeMlp

torch.set_num_threads(1)

SETTINGS: dict[str, Any] = {
    "vocab_size": 100,
    "max_seq_len": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden_size": 32,
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "rope_theta": 10000.0,
}


def small(**changes: Any) -> MoeLlama:
    model = MoeLlama(**(SETTINGS | changes))
    model.init_weights(0)
    return model


def tokens() -> Tensor:
    return torch.randint(0, 100, (3, 16), generator=torch.Generator().manual_seed(1))


def loss_of(model: MoeLlama) -> Tensor:
    return F.cross_entropy(model(tokens()).flatten(0, 1), tokens().roll(-1, dims=1).flatten())


def loop(mlp: MoeMlp, x: Tensor) -> Tensor:
    """One expert after the other, each for its tokens."""
    flat, routing, experts = x.flatten(0, 1), mlp.router(x), mlp.experts
    chosen, weights = routing.chosen.flatten(0, 1), routing.weights.flatten(0, 1)
    out = torch.zeros(flat.shape)
    for index, (gate, up, down) in enumerate(
        zip(experts.gate.weight, experts.up.weight, experts.out.weight, strict=True)
    ):
        token, place = torch.where(chosen == index)
        part = F.linear(F.silu(F.linear(flat[token], gate)) * F.linear(flat[token], up), down)
        out = out.index_add(0, token, part * weights[token, place, None])
    return out.view(x.shape)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_mlp_has_the_values_and_gradients_of_a_loop_over_experts(precision: str) -> None:
    mlp = small().blocks[0].mlp
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    mlp.router.bias[1] = -1.0  # an expert without a token
    x = torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(2)).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        found, counts, _ = mlp(x)
        expected = loop(mlp, x)
    assert counts[1] == 0
    inputs = (x, *mlp.parameters())
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    pairs = [
        (found.float(), expected),
        *zip(
            torch.autograd.grad(found, inputs, direction.to(found.dtype)),
            torch.autograd.grad(expected, inputs, direction.to(found.dtype).float()),
            strict=True,
        ),
    ]
    # the same products and roundings; two terms added in another order, and in bfloat16 the sum is rounded once more
    tolerance = 1e-6 if precision == "float32" else 2**-8
    for value, other in pairs:
        assert (value - other).abs().max() <= tolerance * other.abs().max()


def test_a_token_is_computed_alike_whatever_else_is_in_the_batch() -> None:
    model = small().eval()
    torch.testing.assert_close(model(tokens())[1:2], model(tokens()[1:2]), rtol=0, atol=1e-6)


def test_equal_experts_are_one_mlp() -> None:
    mlp = small(num_experts_per_tok=3).blocks[0].mlp
    with torch.no_grad():
        for layer in (mlp.experts.gate, mlp.experts.up, mlp.experts.out):
            layer.weight.copy_(layer.weight[:1].expand_as(layer.weight) * 5)
    x = torch.randn(2, 16, 32)
    gate, up, down = (layer.weight[0] for layer in (mlp.experts.gate, mlp.experts.up, mlp.experts.out))
    torch.testing.assert_close(mlp(x)[0], F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down))


def test_first_loss_is_ln_of_the_vocabulary() -> None:
    assert loss_of(small()).item() == pytest.approx(math.log(100), abs=0.05)


def test_what_ends_a_branch_starts_smaller_by_depth() -> None:
    experts = small(num_experts=16).blocks[0].mlp.experts
    assert float(experts.gate.weight.std()) == pytest.approx(0.02, rel=0.02)
    assert float(experts.out.weight.std()) == pytest.approx(0.02 / math.sqrt(4), rel=0.02)


def test_every_weight_has_a_gradient_and_no_bias_has() -> None:
    model = small()
    loss_of(model).backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    assert not any(name.endswith("bias") for name, _ in model.named_parameters())


@pytest.mark.parametrize("option", [{"every_nth_block": 1}, {"every_nth_block": 1, "save_ops": "products"}])
def test_recomputed_blocks_count_each_token_once_and_have_the_same_gradients(option: dict[str, Any]) -> None:
    plain, recomputed = small(router_z_loss=0.01), small(router_z_loss=0.01)
    ActivationCheckpoint(**option).apply(recomputed.blocks)
    found = []
    for model in (plain, recomputed):
        loss = loss_of(model)
        routed = model.take_routed()
        assert routed is not None
        assert routed.loads.sum(dim=1).tolist() == [3 * 16 * 2] * 2
        (loss + model.weigh_terms(routed.terms.mean(dim=-1))).backward()
        assert model.take_routed() is None
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


def test_evaluation_keeps_no_routing() -> None:
    model = small()
    with torch.no_grad():
        model(tokens())
    model.eval()(tokens())
    assert model.take_routed() is None


def test_terms_are_weighted_and_summed_over_layers() -> None:
    model = small(router_aux_loss_coef=0.5, router_z_loss=0.25)
    terms = torch.tensor([[1.0, 2.0, 7.0], [3.0, 4.0, 7.0]])  # [L, 3]
    assert float(model.weigh_terms(terms)) == 0.5 * 4 + 0.25 * 6


def test_biases_take_away_the_advantage_of_an_expert() -> None:
    model = small(balance_rate=0.001)
    for block in model.blocks:
        block.mlp.router.bias[0] = 0.1
    largest = []
    for _ in range(150):
        model(tokens())
        routed = model.take_routed()
        assert routed is not None
        largest.append(int(routed.loads.max()))
        model.balance_experts(routed.loads)
    assert largest[0] == 48  # all tokens
    assert max(largest[-10:]) <= 30  # 24 is even


def test_biases_are_saved_as_float32_and_survive_every_move() -> None:
    model = small()
    name = "blocks.1.mlp.router.bias"
    assert model.state_dict()[name].dtype == torch.float32
    model.get_buffer(name).fill_(0.1)
    model.to(torch.bfloat16)
    assert torch.equal(model.get_buffer(name), torch.full((4,), 0.1))
    model.init_buffers()
    assert not model.get_buffer(name).any()


def test_flops_are_those_of_the_experts_that_compute_a_token() -> None:
    dense = small(num_experts=2).flops_per_token(16)
    router = 2 * 6 * (4 - 2) * 32  # two layers, each with two more rows
    assert small(num_experts=4).flops_per_token(16).palm == dense.palm + router
    assert small(num_experts=4).flops_per_token(16).causal == dense.causal + router


@pytest.mark.parametrize(
    ("option", "total", "active"), [("mixtral_nano", 4.2e6, 1.6e6), ("mixtral_8x7b", 46.7e9, 12.9e9)]
)
def test_configured_models_have_the_published_numbers_of_parameters(option: str, total: float, active: float) -> None:
    node = yaml.safe_load((ROOT / f"conf/model/{option}.yaml").read_text())
    node.pop("_target_")
    with torch.device("meta"):
        model = MoeLlama(**node)
    number = sum(parameter.numel() for parameter in model.parameters())
    assert number == pytest.approx(total, rel=0.01)
    assert number - model.num_idle_parameters == pytest.approx(active, rel=0.02)


def test_a_cache_gives_the_tokens_of_a_run_without_one() -> None:
    model = small().eval()
    options: dict[str, Any] = {"temperature": 0.0, "top_k": None, "top_p": None, "seed": 0}
    found = generate(model, [1, 2, 3], 8, **options)
    expected = [1, 2, 3]
    with torch.no_grad():
        for _ in range(8):
            expected.append(int(model(torch.tensor([expected]))[0, -1, :100].argmax()))
    assert found == expected[3:]


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"num_experts_per_tok": 5}, "model.num_experts_per_tok=4"),
        ({"moe_intermediate_size": 50}, "model.moe_intermediate_size=56"),
    ],
)
def test_sizes_that_cannot_work_are_rejected(changes: dict[str, Any], fix: str) -> None:
    with pytest.raises(ConfigError) as error:
        small(**changes)
    assert error.value.fix == fix
