"""Latent attention and its experts: the published sizes, generated text, packed documents, and what is rejected."""

from typing import Any

import pytest
import torch
import yaml
from one_text import generate
from support import ROOT

from recipes.errors import ConfigError
from recipes.model.moe import DeepSeekV3
from recipes.parallel.stages import plan_stages

torch.set_num_threads(1)

SETTINGS: dict[str, Any] = {
    "vocab_size": 100,
    "max_seq_len": 16,
    "num_layers": 3,
    "first_k_dense_replace": 1,
    "num_heads": 4,
    "num_kv_heads": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "moe_intermediate_size": 24,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "rope_theta": 10000.0,
}


def small(**changes: Any) -> DeepSeekV3:
    model = DeepSeekV3(**(SETTINGS | changes))
    model.init_weights(0)
    return model


def published() -> DeepSeekV3:
    settings = yaml.safe_load((ROOT / "conf/model/deepseek_v3.yaml").read_text())
    settings.pop("_target_")
    with torch.device("meta"):
        return DeepSeekV3(**settings)


def test_the_configured_model_has_the_published_numbers_of_parameters() -> None:
    model = published()
    total = sum(parameter.numel() for parameter in model.parameters())
    assert total / 1e9 == pytest.approx(671, abs=0.5)
    # arXiv 2412.19437: 37 billion, which count the rows of the embedding
    assert (total - model.num_idle_parameters) / 1e9 == pytest.approx(37, abs=0.6)


def test_its_stages_have_as_much_to_compute_although_some_layers_have_no_experts() -> None:
    model = published()
    layers = [count for _, count in plan_stages(model, num_ranks=16, schedule="1F1B").layers]
    assert sum(layers) == 61
    # a plain MLP is as wide as the nine experts that compute a token; the head is 1.6 layers
    assert layers == [4, 3, *[4] * 13, 2]


def test_flops_are_those_of_matrices_that_compute_a_token_and_of_heads_of_two_sizes() -> None:
    model, num_tokens = small(), 16
    active = sum(parameter.numel() for parameter in model.parameters()) - model.num_idle_parameters
    active -= model.embedding.weight.numel()
    scores = 4 * (8 + 4) * num_tokens  # of heads, channels and keys
    mixed = 4 * 6 * num_tokens
    assert model.flops_per_token(num_tokens).palm == 6 * active + 6 * 3 * (scores + mixed)


def test_a_cache_gives_the_tokens_of_a_run_without_one() -> None:
    model = small().eval()
    found = generate(model, [1, 2, 3], 8, temperature=0.0, top_k=None, top_p=None, seed=0)
    expected = [1, 2, 3]
    with torch.no_grad():
        for _ in range(8):
            expected.append(int(model(torch.tensor([expected]))[0, -1, :100].argmax()))
    assert found == expected[3:]


def test_documents_in_one_row_do_not_see_each_other() -> None:
    model = small().eval()
    tokens = torch.randint(0, 100, (1, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(10), torch.arange(6)])[None]
    with torch.no_grad():
        packed = model(tokens, positions=positions)
        alone = torch.cat([model(tokens[:, :10]), model(tokens[:, 10:])], dim=1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"num_kv_heads": 2}, "model.num_kv_heads=4"),
        ({"qk_rope_head_dim": 3}, "model.qk_rope_head_dim=4"),
        ({"qk_norm": True}, "model.qk_norm=false"),
        ({"v_head_dim": 13}, "model.v_head_dim=12"),
        ({"first_k_dense_replace": 3}, "model.first_k_dense_replace=2"),
        ({"ffn_hidden_size": None}, "model.ffn_hidden_size=128"),
        ({"n_group": 3}, "model.n_group=2"),
        ({"n_group": 8, "topk_group": 4}, "model.n_group=4"),
        ({"n_group": 4, "topk_group": 5}, "model.topk_group=1"),
    ],
)
def test_sizes_that_cannot_work_are_rejected(changes: dict[str, Any], fix: str) -> None:
    with pytest.raises(ConfigError, match=fix.replace(".", r"\.")):
        small(**changes)
