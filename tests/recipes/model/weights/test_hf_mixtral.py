"""Weights of a model with experts are loaded from and exported to transformers' Mixtral: the same logits both ways."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from recipes.errors import ConfigError
from recipes.model.moe.llama import MoeLlama
from recipes.model.weights import initialize
from recipes.model.weights.huggingface import export_pretrained, load_pretrained

torch.set_num_threads(1)

VOCAB_SIZE = 101  # pads to 128
SETTINGS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_seq_len": 24,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden_size": 32,
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "rope_theta": 500.0,
}


def ours(**changes: Any) -> MoeLlama:
    with torch.device("meta"):
        model = MoeLlama(**(SETTINGS | changes))
    return model.to_empty(device="cpu")


def theirs() -> Any:
    config = transformers.MixtralConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=24,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 500.0, "rope_type": "default"},
        tie_word_embeddings=False,
        sliding_window=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    scramble(model)
    return model


@torch.no_grad()
def scramble(model: nn.Module) -> None:
    """Set random values everywhere: no norm is 1, and the logits depend on all of them."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1.0 + 0.2 * noise if parameter.dim() == 1 else 0.15 * noise)


def logits_of(model: nn.Module) -> torch.Tensor:
    tokens = torch.randint(0, VOCAB_SIZE, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = model(tokens)
    return (out if isinstance(out, torch.Tensor) else out.logits)[..., :VOCAB_SIZE]


def test_weights_of_transformers_give_our_model_the_logits_of_transformers(tmp_path: Path) -> None:
    reference = theirs()
    reference.save_pretrained(tmp_path)
    model = ours(pretrained=str(tmp_path)).eval()
    initialize(model, seed=0)
    expected = logits_of(reference)
    assert expected.std() > 0.3
    # as for a plain Llama: sums of the same numbers in another order
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=1e-5)
    assert torch.equal(model.embedding.weight[VOCAB_SIZE:], torch.zeros(27, 32))


def test_our_export_loads_in_transformers_and_gives_our_logits(tmp_path: Path) -> None:
    model = ours().eval()
    model.init_weights(0)
    scramble(model)
    export_pretrained(model, tmp_path)
    reference, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(reference).__name__ == "MixtralForCausalLM"
    assert not any(report.values()), report
    torch.testing.assert_close(logits_of(reference.eval()), logits_of(model), rtol=0, atol=1e-5)
    back = ours()
    load_pretrained(back, tmp_path)
    for (name, again), value in zip(back.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(again[:VOCAB_SIZE], value[:VOCAB_SIZE]), name


def test_a_model_of_other_experts_is_rejected(tmp_path: Path) -> None:
    theirs().save_pretrained(tmp_path)
    changes = {"num_experts": 8, "num_experts_per_tok": 1, "scoring_func": "sigmoid"}
    with pytest.raises(ConfigError) as error:
        load_pretrained(ours(**changes), tmp_path)
    assert error.value.fix == "model.num_experts=4 model.num_experts_per_tok=2 model.scoring_func=softmax"


def test_a_plain_llama_is_no_model_with_experts(tmp_path: Path) -> None:
    theirs().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "llama"}))
    with pytest.raises(ConfigError, match="of the type llama, and this model is of the type mixtral"):
        load_pretrained(ours(), tmp_path)


@pytest.mark.parametrize("changes", [{"balance_rate": 0.01}, {"scoring_func": "sigmoid"}])
def test_what_the_format_cannot_say_is_not_exported(changes: dict[str, Any], tmp_path: Path) -> None:
    model = ours(**changes)
    model.init_weights(0)
    if "balance_rate" in changes:
        model.balance_experts(torch.tensor([[3, 1, 0, 0], [1, 1, 1, 1]]))
    with pytest.raises(ConfigError) as error:
        export_pretrained(model, tmp_path)
    assert "for the run that is to be exported" in error.value.fix
    assert not list(tmp_path.iterdir())
