"""Adapters: nothing changes before training, peft's logits and gradients, merged weights, and files that peft loads."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from recipes.adapter import NoAdapter, is_adapter
from recipes.adapter.ia3 import IA3
from recipes.adapter.lora import Lora
from recipes.errors import ConfigError
from recipes.model.gpt2 import GPT2
from recipes.model.huggingface import HuggingFace
from recipes.model.llama import Llama
from recipes.model.weights import initialize
from recipes.model.weights.adapter import merge_adapter
from recipes.model.weights.huggingface import export_pretrained
from recipes.model.weights.peft_folder import save_adapter
from recipes.optimizer.muon import Muon
from recipes.optimizer.param_groups import decay_groups

LORA: dict[str, Any] = {
    "r": 4,
    "lora_alpha": 8.0,
    "lora_dropout": 0.0,
    "target_modules": "all",
    "use_rslora": False,
    "use_dora": False,
    "modules_to_save": [],
}
ADAPTERS: dict[str, Any] = {
    "lora": lambda: Lora(**LORA),
    "rslora": lambda: Lora(**LORA | {"use_rslora": True}),
    "dora": lambda: Lora(**LORA | {"use_dora": True}),
    "ia3": lambda: IA3(target_modules="all", feedforward_modules=["down_proj"], modules_to_save=[]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A published Llama of two blocks."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = hf.LlamaConfig(
        vocab_size=64, **size, num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2
    )
    model = hf.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3)
    path = tmp_path_factory.mktemp("published")
    model.save_pretrained(path)
    return str(path)


def tokens() -> Tensor:
    return torch.randint(3, 64, (2, 24), generator=torch.Generator().manual_seed(0))


def adapted(folder: str, adapter: Any, *, seed: int = 0) -> HuggingFace:
    with torch.device("meta"):
        model = HuggingFace(name=folder, pretrained=folder, max_seq_len=64, vocab_size=64)
        adapter.apply(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    initialize(model, seed=seed)  # type: ignore[arg-type]
    return model


def change(model: nn.Module) -> None:
    """Set an adapter to what training could have made of it."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_that_has_not_learned_changes_no_logit(kind: str, folder: str) -> None:
    base = hf.AutoModelForCausalLM.from_pretrained(folder)
    model = adapted(folder, ADAPTERS[kind]())
    difference = (model(tokens()) - base(tokens()).logits).abs().max()
    # DoRA divides by the length of each row and multiplies by it again
    assert difference <= (1e-5 if kind == "dora" else 0.0)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_only_an_adapter_is_trained_and_all_of_it(kind: str, folder: str) -> None:
    model = adapted(folder, ADAPTERS[kind]())
    change(model)
    model(tokens()).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == is_adapter(name), name
        if is_adapter(name):
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("kind", ADAPTERS)
def test_files_give_peft_the_same_logits_and_gradients(kind: str, folder: str, tmp_path: Path) -> None:
    model = adapted(folder, ADAPTERS[kind]())
    change(model)
    save_adapter(model, tmp_path)
    loaded = peft.PeftModel.from_pretrained(
        hf.AutoModelForCausalLM.from_pretrained(folder), str(tmp_path), is_trainable=True
    )
    logits = model(tokens())
    torch.testing.assert_close(loaded(tokens()).logits, logits, rtol=1e-6, atol=1e-6)
    logits.logsumexp(-1).sum().backward()
    loaded(tokens()).logits.logsumexp(-1).sum().backward()
    theirs = dict(loaded.named_parameters())
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            other = theirs[f"base_model.model.{name.removeprefix('inner.')}"]
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_merged_weights_give_the_same_logits_in_the_model_and_in_transformers(
    kind: str, folder: str, tmp_path: Path
) -> None:
    model = adapted(folder, ADAPTERS[kind]())
    change(model)
    expected = model(tokens())
    merge_adapter(model)
    assert not [name for name, _ in model.named_parameters() if is_adapter(name) or "base_layer" in name]
    torch.testing.assert_close(model(tokens()), expected, rtol=1e-5, atol=1e-5)
    export_pretrained(model, tmp_path)
    whole = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(whole(tokens()).logits, model(tokens()))


def make_own(kind: str) -> GPT2 | Llama:
    common = {"vocab_size": 50, "max_seq_len": 32, "num_layers": 2, "num_heads": 4, "hidden_size": 32}
    if kind == "gpt2":
        return GPT2(**common, dropout=0.0)
    return Llama(**common, num_kv_heads=2, ffn_hidden_size=48, rope_theta=1e4)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_models_of_this_collection_take_adapters_too(kind: str, tmp_path: Path) -> None:
    plain = make_own(kind)
    initialize(plain, seed=3)  # type: ignore[arg-type]
    with torch.device("meta"):
        model = make_own(kind)
        Lora(**LORA).apply(model)
    model.to_empty(device="cpu")
    initialize(model, seed=3)  # type: ignore[arg-type]
    ids = tokens() % 50
    assert torch.equal(model(ids), plain(ids)), "the frozen weights are those that the seed draws without an adapter"
    change(model)
    expected = model(ids)
    merge_adapter(model)
    torch.testing.assert_close(model(ids), expected, rtol=1e-5, atol=1e-5)
    export_pretrained(model, tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(ids).logits, expected[..., :50], rtol=1e-5, atol=1e-5)


def test_first_weights_follow_the_seed_and_the_name_alone(folder: str) -> None:
    first, again, other = (adapted(folder, Lora(**LORA), seed=seed) for seed in (0, 0, 1))
    small = adapted(folder, Lora(**LORA | {"target_modules": ["q_proj"]}))
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
        if ".lora_A." in name:
            assert not torch.equal(parameter, other.get_parameter(name))
            assert parameter.abs().max() <= 1 / parameter.shape[1] ** 0.5
    for name, parameter in small.named_parameters():
        assert torch.equal(parameter, first.get_parameter(name)) or "base_layer" not in name


def test_layers_are_chosen_by_the_ends_of_their_names(folder: str) -> None:
    model = adapted(folder, Lora(**LORA | {"target_modules": ["q_proj", "mlp.up_proj"]}))
    found = {name.partition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A." in name}
    layers = ("self_attn.q_proj", "mlp.up_proj")
    assert found == {f"inner.model.layers.{block}.{layer}" for block in range(2) for layer in layers}


def test_a_layer_that_does_not_exist_is_named_with_those_there_are(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"ends with nope; type adapter.target_modules=\[down_proj,gate_proj,k_proj,"):
        adapted(folder, Lora(**LORA | {"target_modules": ["q_proj", "nope"]}))
    with pytest.raises(ConfigError, match=r"\[\]: it names no layer; type adapter.target_modules=all"):
        adapted(folder, Lora(**LORA | {"target_modules": []}))
    with pytest.raises(ConfigError, match="Linear has no linear layer in its blocks.*type adapter=none"):
        Lora(**LORA).apply(nn.Linear(2, 2))


def test_an_adapter_of_other_layers_than_the_published_ones_is_not_written(tmp_path: Path) -> None:
    model = make_own("gpt2")
    Lora(**LORA).apply(model)
    with pytest.raises(ConfigError, match="GPT2 has other layers than the published model"):
        save_adapter(model, tmp_path)


def test_without_an_adapter_everything_is_trained() -> None:
    model = make_own("gpt2")
    NoAdapter().apply(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_factors_are_not_decayed_towards_zero_where_they_switch_off_what_they_multiply(folder: str) -> None:
    model = adapted(folder, IA3(target_modules="all", feedforward_modules=["down_proj"], modules_to_save=[]))
    decay, no_decay = decay_groups(model, weight_decay=0.1)
    assert decay["params"] == []
    assert len(no_decay["params"]) == sum(is_adapter(name) for name, _ in model.named_parameters())
    _, no_decay = decay_groups(adapted(folder, Lora(**LORA)), weight_decay=0.1)
    assert no_decay["params"] == []


def test_muon_finds_no_matrix_among_factors(folder: str) -> None:
    model = adapted(folder, IA3(target_modules="all", feedforward_modules=[], modules_to_save=[]))
    options = {"lr": 0.1, "adamw_lr": None, "momentum": 0.9, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    with pytest.raises(ConfigError, match="HuggingFace has no trained matrix in its `blocks`; type optimizer=adamw"):
        Muon(model, **options)
    assert len(Muon(adapted(folder, Lora(**LORA)), **options).param_groups) >= 1


def test_a_separate_adapter_names_the_weights_that_it_was_trained_beside(folder: str, tmp_path: Path) -> None:
    model = adapted(folder, Lora(**LORA))
    save_adapter(model, tmp_path)
    (tmp_path / "plain").touch()
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {(tmp_path / "plain").stat().st_mode}
    assert peft.PeftConfig.from_pretrained(str(tmp_path)).base_model_name_or_path == folder
    model.pretrained = None
    with pytest.raises(ConfigError, match="drawn from the seed, and are published nowhere"):
        save_adapter(model, tmp_path)
