"""Frozen weights in NF4: bitsandbytes' bits, exact gradients, shards of the same codes, merging into what they were."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers as hf
from nf4_example import nf4_example
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from recipes.activation_checkpoint.host_offload import HostOffload
from recipes.adapter import is_adapter
from recipes.adapter.lora import Lora
from recipes.adapter.nf4_base import describe_base
from recipes.errors import ConfigError
from recipes.model.gpt2 import GPT2
from recipes.model.huggingface import HuggingFace
from recipes.model.llama import Llama
from recipes.model.weights import initialize, restore_precision
from recipes.model.weights.adapter import merge_adapter
from recipes.model.weights.huggingface import export_pretrained
from recipes.model.weights.peft_folder import save_adapter
from recipes.numerics.nf4 import (
    VALUES,
    NF4Linear,
    dequantize,
    empty_nf4,
    fill_nf4,
    get_parts,
    is_nf4,
    list_nf4,
    num_bytes,
    quantize,
)
from recipes.precision import Precision
from recipes.strategy.sharding import ShardPolicy, shard_model

BY_BITSANDBYTES = json.loads((Path(__file__).parent / "bitsandbytes_nf4.json").read_text(encoding="utf-8"))
LORA: dict[str, Any] = {
    "r": 4,
    "lora_alpha": 8.0,
    "lora_dropout": 0.0,
    "target_modules": "all",
    "use_rslora": False,
    "use_dora": False,
    "modules_to_save": [],
}
SIZE = {"vocab_size": 64, "max_seq_len": 32, "num_layers": 2, "num_heads": 4, "hidden_size": 64}


def make(kind: str, base: str | None, *, seed: int = 3) -> GPT2 | Llama:
    with torch.device("meta"):
        model: GPT2 | Llama = (
            GPT2(**SIZE, dropout=0.0)
            if kind == "gpt2"
            else Llama(**SIZE, num_kv_heads=2, ffn_hidden_size=128, rope_theta=1e4)
        )
        Lora(**LORA, quantization=base).apply(model)  # type: ignore[arg-type]
    model.to_empty(device="cpu")
    initialize(model, seed=seed)  # type: ignore[arg-type]
    return model


def tokens() -> Tensor:
    return torch.randint(3, 64, (2, 24), generator=torch.Generator().manual_seed(0))


def in_nf4(weight: Tensor) -> Tensor:
    held = empty_nf4(weight)
    fill_nf4(held, weight)
    return held


def change(model: nn.Module) -> None:
    """Set an adapter to what training could have made of it."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def test_values_codes_scales_and_dequantized_weights_are_those_of_bitsandbytes_bit_for_bit() -> None:
    weight = nf4_example()
    assert list(VALUES) == BY_BITSANDBYTES["values"]
    codes, scales = quantize(weight)
    assert codes.numpy().tobytes().hex() == BY_BITSANDBYTES["codes"]
    assert scales.tolist() == BY_BITSANDBYTES["scales"]
    whole = dequantize(in_nf4(weight))
    assert whole[0].tolist() == BY_BITSANDBYTES["first_row"]
    assert hashlib.sha256(whole.numpy().tobytes()).hexdigest() == BY_BITSANDBYTES["sha256_of_dequantized"]


def test_scales_of_8_bits_would_change_the_weights_by_a_part_of_what_4_bits_do() -> None:
    """Double quantization is another format: bitsandbytes' codes for scales are not linear, torchao's are."""
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    weight = nf4_example()
    ours = dequantize(in_nf4(weight))
    error = float((ours - weight).norm() / weight.norm())
    assert error == pytest.approx(BY_BITSANDBYTES["error"], rel=1e-6)
    assert error < BY_BITSANDBYTES["error_with_double_quantization"] < 1.01 * error
    # and its values have 4 decimals
    by_torchao = to_nf4(weight, 64, 128).get_original_weight()
    assert 1e-3 < float((by_torchao - ours).norm() / weight.norm()) < 2e-2


def test_torchao_reads_the_tensor_as_we_do() -> None:
    held: Any = in_nf4(nf4_example())
    assert torch.equal(held.get_original_weight(), dequantize(held))


def test_a_weight_takes_half_a_byte_and_its_part_of_a_scale() -> None:
    held = in_nf4(nf4_example())
    stored = sum(part.nbytes for part in get_parts(held))
    assert stored == num_bytes(64, 128) + 68, "the 16 values and a zero are beside each weight"
    assert num_bytes(4096, 4096) / 4096**2 == pytest.approx(0.5625, abs=1e-3)
    assert held.numel() == 64 * 128


def test_the_product_has_the_gradient_of_the_dequantized_weight_and_keeps_no_weight() -> None:
    layer = nn.Linear(128, 64)
    layer.requires_grad_(False)
    plain = nn.Linear(128, 64)
    NF4Linear.convert(layer)
    fill_nf4(layer.weight, nf4_example())
    with torch.no_grad():
        plain.weight.copy_(dequantize(layer.weight))
        plain.bias.copy_(layer.bias)
    x = torch.randn(3, 5, 128, generator=torch.Generator().manual_seed(0))
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        out = layer(ours)
    assert {tensor.numel() for tensor in kept} == {64 * 64, 128, 16}, "codes, scales and the values"
    expected = plain(theirs)
    assert torch.equal(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
    assert layer.weight.grad is None


def test_autocast_multiplies_in_the_low_precision() -> None:
    layer = nn.Linear(128, 64)
    layer.requires_grad_(False)
    NF4Linear.convert(layer)
    fill_nf4(layer.weight, nf4_example())
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    low = dequantize(layer.weight).bfloat16()
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, nn.functional.linear(x.bfloat16(), low, layer.bias.bfloat16()))
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, (torch.ones(4, 64).bfloat16() @ low).float())


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_an_adapter_that_has_not_learned_gives_the_logits_of_the_dequantized_weights(kind: str) -> None:
    model, plain = make(kind, "nf4"), make(kind, None)
    quantized = dict(list_nf4(model))
    for name, parameter in plain.named_parameters():
        other = model.get_parameter(name)
        assert other.requires_grad == parameter.requires_grad
        if name in quantized:
            assert not torch.equal(dequantize(other), parameter)
            assert torch.equal(other.quantized_data, quantize(parameter)[0]), "those that the seed draws"
            parameter.data.copy_(dequantize(other))
        else:
            assert torch.equal(other, parameter)
    inside = [name for name, _ in plain.named_parameters() if name.startswith("blocks.") and name.endswith("r.weight")]
    assert set(quantized) == set(inside), "all linear layers of the blocks and nothing else"
    assert torch.equal(model(tokens()), plain(tokens()))


def test_the_description_counts_weights_and_bytes_of_the_base() -> None:
    model = make("gpt2", "nf4")
    num_weights = 2 * 12 * 64 * 64
    num_frozen = sum(parameter.numel() for name, parameter in model.named_parameters() if not is_adapter(name))
    description = f"{num_weights:,} of {num_frozen:,} frozen weights in NF4, 0.1 instead of 0.4 MiB"
    assert describe_base(model) == description
    assert describe_base(make("gpt2", None)) is None


def test_a_change_of_dtype_leaves_codes_and_scales_alone() -> None:
    model = make("gpt2", "nf4")
    before = {name: [part.clone() for part in get_parts(weight)] for name, weight in list_nf4(model)}
    model.to(torch.bfloat16)
    assert model.head.weight.dtype == torch.bfloat16
    after = {name: get_parts(weight) for name, weight in list_nf4(model)}
    assert before.keys() == after.keys()
    for name, parts in after.items():
        assert all(torch.equal(*pair) for pair in zip(before[name], parts, strict=True)), name
    assert model(tokens()).dtype == torch.bfloat16


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Be rank 1 of two, whose collectives do nothing."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def policy() -> ShardPolicy:
    return ShardPolicy(
        precision=Precision(name="bf16-mixed"),
        offload=torch.distributed.fsdp.OffloadPolicy(),
        reshard_after_forward=True,
        reduce_dtype=torch.float32,
    )


@pytest.mark.usefixtures("two_ranks")
def test_a_shard_holds_the_codes_and_scales_of_its_rows() -> None:
    with torch.device("meta"):
        model = GPT2(**SIZE, dropout=0.0)
        Lora(**LORA, quantization="nf4").apply(model)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    shard_model(model, mesh=mesh, policy=policy(), option="fsdp")
    model.to_empty(device="cpu")
    initialize(model, seed=3)  # type: ignore[arg-type]
    whole = dict(list_nf4(make("gpt2", "nf4")))
    shards = dict(list_nf4(model))
    assert whole.keys() == shards.keys()
    for name, shard in shards.items():
        codes, scales, *_ = get_parts(shard)
        expected = get_parts(whole[name])
        assert shard.numel() == whole[name].numel()
        assert torch.equal(codes, expected[0].chunk(2)[1]), name
        assert torch.equal(scales, expected[1].chunk(2)[1]), name


@pytest.mark.usefixtures("two_ranks")
def test_rows_that_do_not_divide_over_the_ranks_are_refused() -> None:
    with torch.device("meta"):
        model = Llama(**SIZE, num_kv_heads=2, ffn_hidden_size=65, rope_theta=1e4)
        Lora(**LORA, quantization="nf4").apply(model)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    rejected = r"adapter.quantization=nf4 with 2 shards: .* has 65 rows, which are not divisible by 2"
    with pytest.raises(ConfigError, match=rejected):
        shard_model(model, mesh=mesh, policy=policy(), option="fsdp")


def test_codes_do_not_go_to_host_memory_with_the_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    block = make("gpt2", "nf4").blocks[0]
    copied: list[Tensor] = []
    copy = HostOffload.copy
    monkeypatch.setattr(HostOffload, "copy", lambda self, tensor: copied.append(tensor) or copy(self, tensor))
    x = torch.randn(2, 24, 64, requires_grad=True)
    with HostOffload(min_bytes=1).saving(is_first=True, is_last=False)(block, (x,), {}):
        block(x)
    assert copied
    held = [part.data_ptr() for _, weight in list_nf4(block) for part in get_parts(weight)]
    assert not {tensor.data_ptr() for tensor in copied} & set(held)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A published Llama of two blocks; the inputs of the last layer of its MLP do not divide into blocks of 64."""
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = hf.LlamaConfig(
        vocab_size=64, **size, num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2
    )
    path = tmp_path_factory.mktemp("published")
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


def published(folder: str, base: str | None) -> HuggingFace:
    with torch.device("meta"):
        model = HuggingFace(name=folder, pretrained=folder, max_seq_len=64, vocab_size=64)
        Lora(**LORA, quantization=base).apply(model)  # type: ignore[arg-type]
    model.to_empty(device="cpu")
    initialize(model, seed=0)  # type: ignore[arg-type]
    return model


def test_published_weights_are_quantized_where_their_inputs_divide_into_blocks(folder: str) -> None:
    model = published(folder, "nf4")
    base = hf.AutoModelForCausalLM.from_pretrained(folder)
    for name, parameter in model.inner.named_parameters():
        if is_adapter(name):
            continue
        theirs = base.get_parameter(name.replace("base_layer.", ""))
        if "base_layer" in name and "down_proj" not in name:
            assert torch.equal(dequantize(parameter), dequantize(in_nf4(theirs.detach()))), name
        else:
            assert not is_nf4(parameter)
            assert torch.equal(parameter, theirs), name


def test_an_adapter_is_merged_into_what_its_base_was_quantized_from(folder: str, tmp_path: Path) -> None:
    model, plain = published(folder, "nf4"), published(folder, None)
    change(model)
    change(plain)
    weights = [(dequantize(weight), plain.get_parameter(name)) for name, weight in list_nf4(model)]
    squares = [((a - b).double().square().sum(), b.double().square().sum()) for a, b in weights]
    expected = (sum(a for a, _ in squares) / sum(b for _, b in squares)) ** 0.5
    difference = restore_precision(model, seed=0)  # type: ignore[arg-type]
    assert difference == pytest.approx(float(expected), rel=1e-6)
    assert 0.08 < float(expected) < 0.1, "4 bits of normal weights"
    for merged in (model, plain):
        merge_adapter(merged)
    for name, parameter in plain.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
    export_pretrained(model, tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(tokens()).logits, plain(tokens()))


def test_a_base_in_full_precision_has_nothing_to_restore(folder: str) -> None:
    assert restore_precision(published(folder, None), seed=0) is None  # type: ignore[arg-type]


def test_an_adapter_beside_nf4_is_written_for_peft_as_any_other(folder: str, tmp_path: Path) -> None:
    model = published(folder, "nf4")
    change(model)
    save_adapter(model, tmp_path)
    loaded = peft.PeftModel.from_pretrained(hf.AutoModelForCausalLM.from_pretrained(folder), str(tmp_path))
    with torch.no_grad():
        for name, weight in list_nf4(model):
            loaded.get_parameter(f"base_model.model.{name.removeprefix('inner.')}").copy_(dequantize(weight))
    torch.testing.assert_close(loaded(tokens()).logits, model(tokens()), rtol=1e-6, atol=1e-6)


def test_a_model_without_a_layer_that_fits_is_refused() -> None:
    config = hf.GPT2Config(vocab_size=64, n_embd=64, n_layer=1, n_head=2, n_positions=32)
    with torch.device("meta"):
        model: Any = nn.Module()
        model.blocks = hf.GPT2LMHeadModel(config).transformer.h
    with pytest.raises(ConfigError, match="no linear layer whose inputs divide into blocks of 64; type adapter=lora"):
        Lora(**LORA, quantization="nf4").apply(model)
