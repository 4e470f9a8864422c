"""Muon against torch's two optimizers, on shards and replicas as on one device, and each rank does its share."""

import copy
import math
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import composed_config
from thread_ranks import LAYOUTS, NUM_RANKS, Net, run_on_threads, train
from torch import Tensor, nn
from torch.optim import _muon

from recipes.adapter.lora import Lora
from recipes.config.instantiate import make_optimizer
from recipes.errors import ConfigError
from recipes.model import Stack
from recipes.model.gpt2 import GPT2
from recipes.model.huggingface import HuggingFace
from recipes.model.resnet import ResNet18
from recipes.model.weights import initialize
from recipes.model.weights.huggingface import export_pretrained
from recipes.optimizer import DividesWork, muon
from recipes.optimizer.adafactor import Adafactor
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


def make_adafactor(model: nn.Module) -> Adafactor:
    return Adafactor(model, lr=0.1, beta2_decay=-0.8, eps=(1e-15, 1e-3), clip_threshold=1.0, weight_decay=0.0)


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
    config = composed_config("model=resnet18", "optimizer=muon")
    hidden = make_optimizer(config)(model).param_groups[0]
    assert len(hidden["params"]) == 19  # 16 convolutions in 8 blocks, 3 shortcuts
    assert hidden["momentum"] == config["optimizer"]["momentum"]


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


# --- which tensors are matrices, in models of others ---


def make_transformers(kind: str, **more: object) -> nn.Module:
    """Return a nano model of transformers behind the wrapper, on the CPU with random weights."""
    from transformers import AutoConfig

    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = AutoConfig.for_model(kind, vocab_size=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more)
    for name, value in (small | {"max_position_embeddings": 16} | more).items():
        setattr(config, name, value)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return HuggingFace(name=folder, pretrained=None, max_seq_len=16, vocab_size=32)


# kind, settings, layer -> which of its outputs belong to each matrix, found by running it
FUSED = [
    ("gpt2", {}, "attn.c_attn"),
    ("gpt_neox", {}, "attention.query_key_value"),
    ("gpt_bigcode", {"multi_query": True, "n_inner": 24}, "attn.c_attn"),
    ("gpt_bigcode", {"multi_query": False, "n_inner": 24}, "attn.c_attn"),
    ("codegen", {"num_attention_heads": 4, "rotary_dim": 4, "n_ctx": 16}, "attn.qkv_proj"),
    ("phi3", {"num_key_value_heads": 1}, "self_attn.qkv_proj"),
    ("phi3", {"num_key_value_heads": 1}, "mlp.gate_up_proj"),
    ("persimmon", {}, "self_attn.query_key_value"),
]


@pytest.mark.parametrize(("kind", "settings", "layer"), FUSED)
def test_fused_layers_of_transformers_are_taken_apart_where_their_forward_pass_does(
    kind: str, settings: dict[str, object], layer: str
) -> None:
    """Outputs of one matrix are exchangeable features of one product: queries, keys, values, gate or up.

    A value is scaled: attention is linear in it, and in no query or key; a gate passes a nonlinearity, up does not.
    """
    torch.manual_seed(0)
    model: Any = make_transformers(kind, **settings).eval()
    stacks = dict(muon._find_stacks(model))
    module = model.blocks[0].get_submodule(layer)
    stack = stacks[module.weight]
    num_outputs = sum(stack.sizes) * stack.num_groups
    group = torch.arange(num_outputs).view(stack.num_groups, -1).split(stack.sizes, dim=1)
    tokens = torch.randint(32, (1, 8))
    parent: Any = model.blocks[0].get_submodule(layer.rpartition(".")[0])
    seen: list[Tensor] = []
    parent.register_forward_hook(lambda _, __, output: seen.append(output[0] if isinstance(output, tuple) else output))

    def response(outputs: Tensor, factor: float) -> Tensor:
        """Return what the module computes with some outputs of the fused layer scaled."""
        scale = torch.ones(num_outputs)
        scale[outputs] = factor
        handle = module.register_forward_hook(lambda _, __, output: output * scale)
        seen.clear()
        with torch.no_grad():
            model(tokens)
        handle.remove()
        return seen[0].double()

    last = group[-1].flatten() if kind != "codegen" else group[1].flatten()  # CodeGen has query, value, key
    zero, one, two = (response(last, factor) for factor in (0.0, 1.0, 2.0))
    torch.testing.assert_close(two - one, one - zero, rtol=1e-4, atol=1e-6)  # all of it is linear
    assert (one - zero).abs().max() > 1e-5
    others = torch.tensor(sorted(set(range(num_outputs)) - set(last.tolist())))
    for index in others[:: max(len(others) // 6, 1)]:
        zero, one, two = (response(index[None], factor) for factor in (0.0, 1.0, 60.0))
        assert not torch.allclose((two - one) / 59, one - zero, rtol=1e-3, atol=1e-9), f"output {index} is linear, too"


def test_a_transposed_stack_steps_as_the_same_stack_by_rows_and_groups_as_matrices_apart() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(12, 5)
    apart = torch.cat([muon._orthogonalize_scaled(part) for part in matrix.split(4)])
    by_rows = muon._orthogonalize_stack(matrix, Stack((4, 4, 4)))
    torch.testing.assert_close(by_rows, apart, rtol=0, atol=0)
    by_columns = muon._orthogonalize_stack(matrix.mT.contiguous(), Stack((4, 4, 4), by_columns=True))
    torch.testing.assert_close(by_columns.mT, apart)
    mixed = matrix.view(3, 2, 2, 5).transpose(0, 1).reshape(12, 5)  # two heads, each with two rows of every matrix
    in_groups = muon._orthogonalize_stack(mixed, Stack((2, 2, 2), num_groups=2))
    expected = apart.view(3, 2, 2, 5).transpose(0, 1).reshape(12, 5)
    torch.testing.assert_close(in_groups, expected)


@pytest.mark.parametrize("make_optimizer", [make, make_adafactor])
def test_the_stacked_experts_of_transformers_are_rejected(make_optimizer: Callable[[nn.Module], Any]) -> None:
    model = make_transformers("mixtral", num_key_value_heads=1, num_local_experts=4)
    with pytest.raises(ConfigError, match=r"experts\.gate_up_proj, \[4, 48, 16\], stacks matrices, such as those of"):
        make_optimizer(model)


def test_a_fused_layer_of_unknown_order_is_rejected() -> None:
    model: Any = make_transformers("gpt_neox")
    model.inner.config.model_type = "unknown"
    with pytest.raises(ConfigError, match=r"query_key_value computes several matrix products at once"):
        make(model)


def test_what_is_taken_as_a_matrix_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="lightning_recipes"):
        make(make_transformers("gpt2"))
    [line] = [record.getMessage() for record in caplog.records if "orthogonalizes" in record.getMessage()]
    assert "2 x attn.c_attn.weight [16, 48] as 3 matrices, 2 x attn.c_proj.weight [16, 16], " in line


def test_fused_weights_of_torch_modules_and_adapters_are_taken_apart_and_embeddings_are_none() -> None:
    blocks = nn.ModuleList(
        [nn.ModuleList([nn.MultiheadAttention(4, 1), nn.LSTM(4, 3), nn.GRU(4, 3), nn.Embedding(5, 4)])]
    )
    model = nn.Module()
    model.blocks = blocks
    optimizer = make(model)
    names = {parameter: name for name, parameter in blocks[0].named_parameters()}
    assert {names[parameter]: stack.sizes for parameter, stack in optimizer._stacks.items()} == {
        "0.in_proj_weight": (4, 4, 4),
        "1.weight_ih_l0": (3, 3, 3, 3),
        "1.weight_hh_l0": (3, 3, 3, 3),
        "2.weight_ih_l0": (3, 3, 3),
        "2.weight_hh_l0": (3, 3, 3),
    }
    assert "3.weight" not in {names[parameter] for parameter in optimizer.param_groups[0]["params"]}
    adapted = GPT2(vocab_size=8, max_seq_len=4, num_layers=1, num_heads=2, hidden_size=4, dropout=0.0)
    Lora(
        r=2, lora_alpha=2, lora_dropout=0.0, target_modules="all", use_rslora=False, use_dora=False, modules_to_save=[]
    ).apply(adapted)
    assert [stack.sizes for stack in make(adapted)._stacks.values()] == [(4, 4, 4)]  # B of the fused layer


@pytest.mark.parametrize("make_optimizer", [make, make_adafactor])
def test_gpt2_of_transformers_takes_the_steps_of_our_own(
    make_optimizer: Callable[[nn.Module], Any], tmp_path: Path
) -> None:
    own = GPT2(vocab_size=32, max_seq_len=16, num_layers=2, num_heads=2, hidden_size=16, dropout=0.0)
    initialize(own, seed=0)
    export_pretrained(own, tmp_path)
    theirs = HuggingFace(name=str(tmp_path), pretrained=str(tmp_path), max_seq_len=16, vocab_size=32)
    initialize(theirs, seed=0)
    losses: list[list[float]] = []
    for model in (own, theirs.eval()):
        optimizer, tokens = make_optimizer(model), torch.arange(32).view(2, 16) * 5 % 32  # [B, T]
        losses.append([])
        for _ in range(5):
            loss = nn.functional.cross_entropy(model(tokens)[:, :, :32].flatten(0, 1), tokens.flatten())
            losses[-1].append(float(loss))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    # float32 products of transposed matrices, in another order
    assert losses[0] == pytest.approx(losses[1], rel=2e-6)
    assert losses[0][0] - losses[0][-1] > 0.05
