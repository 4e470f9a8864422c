"""Weights are loaded from and exported to transformers: the same logits both ways."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from recipes.model.gpt2 import GPT2
from recipes.model.llama import Llama
from recipes.model.weights import huggingface, initialize
from recipes.model.weights.huggingface import export_pretrained, load_pretrained

torch.set_num_threads(1)

VOCAB_SIZE = 101  # pads to 128
# Logits are of order 1 and sums of at most 96 products; another order of the same float32 sums
# moves them by a few times 2^-24 per layer. A wrong transpose or rotation moves them by over 1e-2.
TOLERANCE = {"rtol": 0.0, "atol": 1e-5}

GPT2_SHAPES = {
    "vocab_size": VOCAB_SIZE,
    "max_seq_len": 24,
    "num_layers": 2,
    "num_heads": 4,
    "hidden_size": 32,
    "dropout": 0.0,
}
LLAMA_SHAPES = {
    "vocab_size": VOCAB_SIZE,
    "max_seq_len": 24,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 96,
    "rope_theta": 500.0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2_SHAPES,
    "gpt2_untied": GPT2_SHAPES | {"tie_embeddings": False},
    "llama": LLAMA_SHAPES,
    "llama_grouped": LLAMA_SHAPES | {"num_kv_heads": 2},
    "llama_one_group": LLAMA_SHAPES | {"num_kv_heads": 1, "rms_eps": 1e-3},
    "llama_tied": LLAMA_SHAPES | {"tie_embeddings": True},
    "llama_scaled": LLAMA_SHAPES | {"rope_theta": 500000.0, "rope_scaling_factor": 8.0},
    "llama_wide_heads": LLAMA_SHAPES | {"head_dim": 16},
    "llama_qk_norm": LLAMA_SHAPES | {"qk_norm": True, "num_kv_heads": 2, "head_dim": 16},
}


def ours(variant: str, **changes: object) -> GPT2 | Llama:
    architecture = GPT2 if variant.startswith("gpt2") else Llama
    with torch.device("meta"):
        model = architecture(**(VARIANTS[variant] | changes))
    return model.to_empty(device="cpu")


def theirs(variant: str) -> transformers.PreTrainedModel:
    """Return a transformers model with random weights, norms and biases included."""
    shapes = VARIANTS[variant]
    common = {"vocab_size": VOCAB_SIZE, "bos_token_id": None, "eos_token_id": None}
    common["tie_word_embeddings"] = shapes.get("tie_embeddings", variant == "gpt2")
    if variant.startswith("gpt2"):
        config = transformers.GPT2Config(n_positions=24, n_embd=32, n_layer=2, n_head=4, **common)
    else:
        rope = {"rope_theta": shapes["rope_theta"], "rope_type": "default"}
        if "rope_scaling_factor" in shapes:
            rope |= {
                "rope_type": "llama3",
                "factor": shapes["rope_scaling_factor"],
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        kind = transformers.Qwen3Config if "qk_norm" in shapes else transformers.LlamaConfig
        config = kind(
            hidden_size=32,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=shapes["num_kv_heads"],
            head_dim=shapes.get("head_dim", 8),
            max_position_embeddings=24,
            rms_norm_eps=shapes.get("rms_eps", 1e-5),
            rope_parameters=rope,
            **common,
        )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    scramble(model)
    return model


@torch.no_grad()
def scramble(model: nn.Module) -> None:
    """Set random values everywhere: no norm is 1, no bias 0, and the logits depend on all of them."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1.0 + 0.2 * noise if parameter.dim() == 1 else 0.15 * noise)


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (2, 24), generator=torch.Generator().manual_seed(1))


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        out = model(tokens())
    return out if isinstance(out, torch.Tensor) else out.logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_weights_give_our_model_the_logits_of_transformers(variant: str, tmp_path: Path) -> None:
    reference = theirs(variant)
    reference.save_pretrained(tmp_path)
    model = ours(variant, pretrained=str(tmp_path)).eval()
    initialize(model, seed=0)
    logits = logits_of(model)
    assert logits.shape == (2, 24, 128)
    expected = logits_of(reference)
    assert expected.std() > 0.3
    torch.testing.assert_close(logits[..., :VOCAB_SIZE], expected, **TOLERANCE)
    assert torch.equal(model.embedding.weight[VOCAB_SIZE:], torch.zeros(27, 32))


@pytest.mark.parametrize("variant", VARIANTS)
def test_our_export_loads_in_transformers_and_gives_our_logits(variant: str, tmp_path: Path) -> None:
    model = ours(variant).eval()
    model.init_weights(0)
    scramble(model)
    with torch.no_grad():
        model.embedding.weight[VOCAB_SIZE:] = 0.0
        model.head.weight[VOCAB_SIZE:] = 0.0
    export_pretrained(model, tmp_path)
    reference, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert reference.dtype == torch.float32
    expected = logits_of(model)[..., :VOCAB_SIZE]
    torch.testing.assert_close(logits_of(reference.eval()), expected, **TOLERANCE)
    back = ours(variant)
    load_pretrained(back, tmp_path)
    for (name, ours_again), value in zip(back.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(ours_again, value), name


def test_bfloat16_is_exported_as_bfloat16(tmp_path: Path) -> None:
    model = ours("llama_grouped").to(torch.bfloat16)
    model.init_weights(0)
    export_pretrained(model, tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert reference.dtype == torch.bfloat16
    exported = reference.model.layers[1].mlp.up_proj.weight
    assert torch.equal(exported, model.blocks[1].mlp.up.weight)


def test_sharded_safetensors_and_pickled_weights_load_the_same(tmp_path: Path) -> None:
    reference = theirs("llama_tied")
    reference.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").is_file()
    reference.save_pretrained(tmp_path / "pickled")
    whole = load_file(tmp_path / "pickled" / "model.safetensors")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    torch.save(whole, tmp_path / "pickled" / "pytorch_model.bin")
    for folder in ("sharded", "pickled"):
        model = ours("llama_tied")
        load_pretrained(model, tmp_path / folder)
        assert torch.equal(model.embedding.weight[:VOCAB_SIZE], whole["model.embed_tokens.weight"])
        assert torch.equal(
            model.blocks[1].attention.qkv.weight[32:64],
            whole["model.layers.1.self_attn.k_proj.weight"],
        )


def test_the_oldest_gpt2_files_load_too(tmp_path: Path) -> None:
    """No `transformer.` in names, masks among the weights, defaults missing in config.json."""
    theirs("gpt2").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {name.removeprefix("transformer."): value.clone() for name, value in load_file(file).items()}
    weights["h.0.attn.bias"] = torch.ones(1, 1, 24, 24)
    weights["h.1.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(weights, file)
    sizes = {"vocab_size": VOCAB_SIZE, "n_positions": 24, "n_layer": 2, "n_head": 4, "n_embd": 32}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"} | sizes))
    model = ours("gpt2")
    load_pretrained(model, tmp_path)
    assert torch.equal(model.blocks[1].mlp.up.weight, weights["h.1.mlp.c_fc.weight"].t())


def test_an_export_includes_the_tokenizer_and_its_end_of_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    source, target = tmp_path / "tokenizer", tmp_path / "out"
    source.mkdir()
    words = Tokenizer(models.WordLevel({"a": 0, "<end>": 7}, unk_token="a"))
    words.save(str(source / "tokenizer.json"))
    settings = {"eos_token": "<end>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    model = ours("gpt2")
    model.init_weights(0)
    export_pretrained(model, target, tokenizer_folder=source)
    assert transformers.AutoTokenizer.from_pretrained(target).eos_token_id == 7
    reference = transformers.AutoModelForCausalLM.from_pretrained(target)
    assert reference.generation_config.eos_token_id == 7


def test_a_hub_name_loads_what_the_hub_gives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    theirs("gpt2").save_pretrained(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(tmp_path))
    model = ours("gpt2", pretrained="somebody/gpt2")
    initialize(model, seed=0)
    assert model.position.weight.abs().sum() > 0


def test_an_export_that_reads_back_differently_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def rotten(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
        tensors["transformer.h.1.ln_1.bias"][3] += 2**-20
        save_file(tensors, file, metadata)

    monkeypatch.setattr(huggingface, "save_file", rotten)
    model = ours("gpt2")
    model.init_weights(0)
    with pytest.raises(OSError, match=r"blocks\.1\.attention_norm\.bias reads back differently"):
        export_pretrained(model, tmp_path)
