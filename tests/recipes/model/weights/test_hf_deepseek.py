"""Weights of DeepSeek-V3's kind are loaded from and exported to transformers: the same logits and gradients."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from recipes.errors import ConfigError
from recipes.model.moe import DeepSeekV3
from recipes.model.weights import initialize
from recipes.model.weights.huggingface import export_pretrained, load_pretrained

torch.set_num_threads(1)

VOCAB_SIZE = 101  # pads to 128
SETTINGS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_seq_len": 24,
    "num_layers": 3,
    "first_k_dense_replace": 1,
    "num_heads": 4,
    "num_kv_heads": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 40,
    "moe_intermediate_size": 24,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "num_shared_experts": 2,
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
    "rope_theta": 500.0,
    "rms_eps": 1e-5,  # not that of the latent vectors, which is always 1e-6
}


def ours(**changes: Any) -> DeepSeekV3:
    with torch.device("meta"):
        model = DeepSeekV3(**(SETTINGS | changes))
    return model.to_empty(device="cpu")


def initialized() -> DeepSeekV3:
    model = ours()
    model.init_weights(3)
    return model


def theirs(**changes: Any) -> Any:
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 40,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "max_position_embeddings": 24,
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
    }
    config = transformers.DeepseekV3Config(**(settings | changes), bos_token_id=None, eos_token_id=None)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("score_correction_bias"):
                parameter.copy_(0.1 * noise)
            elif isinstance(parameter, nn.Parameter):
                parameter.copy_(1.0 + 0.2 * noise if parameter.dim() == 1 else 0.15 * noise)
    return model


def tokens() -> Tensor:
    return torch.randint(0, VOCAB_SIZE, (2, 24), generator=torch.Generator().manual_seed(1))


def logits_of(model: nn.Module) -> Tensor:
    out = model(tokens())
    return (out if isinstance(out, Tensor) else out.logits)[..., :VOCAB_SIZE]


@pytest.mark.parametrize("q_lora_rank", [16, None])
def test_logits_and_gradients_are_those_of_transformers(q_lora_rank: int | None, tmp_path: Path) -> None:
    reference = theirs(q_lora_rank=q_lora_rank)
    reference.save_pretrained(tmp_path)
    model = ours(pretrained=str(tmp_path), q_lora_rank=q_lora_rank).eval()
    initialize(model, seed=0)
    found, expected = logits_of(model), logits_of(reference)
    assert expected.std() > 0.3
    # sums of the same numbers in another order
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for logits in (found, expected):
        F.cross_entropy(logits.flatten(0, 1), tokens().roll(-1, 1).flatten()).backward()
    # one parameter of each kind, of the layer that is reached last and of the first that has experts
    for name, other in {
        "embedding.weight": "model.embed_tokens.weight",
        "blocks.0.attention.key_value_down.weight": "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
        "blocks.1.attention.out.weight": "model.layers.1.self_attn.o_proj.weight",
        "blocks.1.mlp.router.weight": "model.layers.1.mlp.gate.weight",
        "blocks.1.mlp.experts.out.weight": "model.layers.1.mlp.experts.down_proj",
        "blocks.2.mlp.shared.up.weight": "model.layers.2.mlp.shared_experts.up_proj.weight",
    }.items():
        grad = model.get_parameter(name).grad
        assert grad is not None
        wanted = reference.get_parameter(other).grad
        torch.testing.assert_close(grad[: len(wanted)], wanted, rtol=1e-4, atol=1e-6, msg=name)


def test_an_export_is_what_transformers_loads_biases_included(tmp_path: Path) -> None:
    model = ours().eval()
    model.init_weights(3)
    with torch.no_grad():
        for index in (1, 2):
            model.get_buffer(f"blocks.{index}.mlp.router.bias").normal_(generator=torch.Generator().manual_seed(index))
    export_pretrained(model, tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        torch.testing.assert_close(logits_of(model), logits_of(loaded), rtol=0, atol=1e-5)
    again = ours()
    load_pretrained(again, tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    ("published", "named"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}}, "rope_type=yarn"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            r"its weights are quantized \(fp8\)",
        ),
        ({"scoring_func": "softmax"}, "model.scoring_func=softmax"),
    ],
)
def test_published_weights_of_another_kind_are_refused(published: dict[str, Any], named: str, tmp_path: Path) -> None:
    export_pretrained(initialized(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | published))
    with pytest.raises(ConfigError, match=named):
        load_pretrained(ours(), tmp_path)


def test_of_many_missing_tensors_a_message_lists_five(tmp_path: Path) -> None:
    export_pretrained(initialized(), tmp_path)
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        load_pretrained(ours(), tmp_path)
    assert re.search(r"missing: (\S+, ){4}\S+ and \d+ more; type", str(caught.value))


def test_other_sizes_are_one_message_with_what_to_type(tmp_path: Path) -> None:
    theirs().save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_pretrained(ours(kv_lora_rank=16, num_shared_experts=1, routed_scaling_factor=1.0), tmp_path)
    for typed in ("model.kv_lora_rank=12", "model.num_shared_experts=2", "model.routed_scaling_factor=2.5"):
        assert typed in str(caught.value)
