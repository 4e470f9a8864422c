"""LLaVA models compute what transformers computes, whole or put together; images are read in the order of rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from vision_language_cases import IMAGE_SIZE, IMAGE_TOKEN, PATCHES, VOCAB_SIZE, make_parts, write_llava

from recipes.config.published import read_llava_size
from recipes.errors import ConfigError
from recipes.model.llava import Llava
from recipes.model.weights import initialize
from recipes.model.weights.huggingface import export_pretrained

_KEYS = ("image_token_id", "image_seq_length", "image_size", "in_channels", "vocab_size")
_NOTHING = dict.fromkeys(("name", "vision", "language", "pretrained", "vision_pretrained", "language_pretrained"))


def make(**given: Any) -> Llava:
    """Return a model with weights; what a config.json says is read from it."""
    settings = {**_NOTHING, "vision_feature_layer": -2, "max_seq_len": 64} | given
    named = [settings[key] for key in ("name", "vision", "language")]
    settings = {key: read_llava_size(*named, key) for key in _KEYS} | settings
    with torch.device("meta"):
        model = Llava(**settings)
    model.to_empty(device="cpu")
    initialize(model, seed=3)
    return model


def make_published(folder: Path, **sizes: Any) -> Any:
    """Write a whole model of transformers with weights, and return it."""
    from transformers import AutoConfig, LlavaForConditionalGeneration

    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(AutoConfig.from_pretrained(write_llava(folder, **sizes)))
    nn.init.normal_(model.lm_head.weight, std=0.3)
    model.save_pretrained(folder)
    return model.eval()


def make_rows() -> tuple[Tensor, Tensor]:
    """Return rows of tokens with two images, none and one, [3, 20], and these images, [3, C, S, S]."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(IMAGE_TOKEN, (3, 20), generator=generator)
    for row, begin in ((0, 1), (0, 9), (2, 15)):
        tokens[row, begin : begin + PATCHES] = IMAGE_TOKEN
    return tokens, torch.randn(3, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)


@pytest.mark.parametrize("vision", ["clip_vision_model", "siglip_vision_model"])
@pytest.mark.parametrize("language", ["llama", "qwen2", "mistral"])
def test_logits_and_gradients_are_those_of_transformers(tmp_path: Path, vision: str, language: str) -> None:
    published = make_published(tmp_path, vision=vision, language=language)
    model = make(name=str(tmp_path), pretrained=str(tmp_path)).eval()
    tokens, images = make_rows()
    expected = published(input_ids=tokens, pixel_values=images).logits
    found = model(tokens, images)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    theirs = {name: parameter.grad for name, parameter in published.named_parameters()}
    compared = [name for name, parameter in model.inner.named_parameters() if parameter.grad is not None]
    for name, parameter in model.inner.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, theirs[name], rtol=1e-5, atol=1e-5, msg=name)
    # what transformers computes and nobody reads has no gradient there either, and is not computed here
    assert {name for name, grad in theirs.items() if grad is not None} == {*compared}
    rows_of_text = tokens[1:2]
    torch.testing.assert_close(model(rows_of_text), published(input_ids=rows_of_text).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("layer", "read"), [(-1, 3), (-2, 2), (1, 1), ([1, -1], 3)])
def test_layers_behind_the_one_that_is_read_are_left_out(tmp_path: Path, layer: Any, read: int) -> None:
    from transformers import AutoConfig, LlavaForConditionalGeneration

    config = AutoConfig.from_pretrained(write_llava(tmp_path / "config"))
    config.vision_feature_layer = layer
    torch.manual_seed(0)
    published = LlavaForConditionalGeneration(config).eval()
    published.save_pretrained(tmp_path / "whole")
    model = make(name=str(tmp_path / "whole"), pretrained=str(tmp_path / "whole")).eval()
    assert len(model.named_blocks()["inner.model.vision_tower.encoder.layers"]) == read
    tokens, images = make_rows()
    expected = published(input_ids=tokens, pixel_values=images).logits
    assert torch.equal(model(tokens, images), expected)
    export_pretrained(model, tmp_path / "export")
    again = LlavaForConditionalGeneration.from_pretrained(tmp_path / "export").eval()
    assert torch.equal(again(input_ids=tokens, pixel_values=images).logits, expected)


@pytest.mark.parametrize("vision", ["clip", "siglip"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_put_together_has_the_weights_of_its_parts(tmp_path: Path, vision: str, tied: bool) -> None:
    both, causal = make_parts(tmp_path, vision=vision, language="qwen2", tie_word_embeddings=tied)
    parts = {part: str(tmp_path / part) for part in ("vision", "language")}
    model = make(**parts, **{f"{part}_pretrained": place for part, place in parts.items()}).eval()
    assert (model.image_token_id, model.vocab_size) == (60, 64)  # behind the vocabulary, which is extended
    theirs = both.vision_model.state_dict()
    for name, weight in model.inner.model.vision_tower.state_dict().items():
        assert torch.equal(weight, theirs[name]), name
    tokens = torch.randint(60, (2, 12), generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(tokens)[..., :60], causal(tokens).logits)
    embedding = model.inner.get_input_embeddings().weight
    torch.testing.assert_close(embedding[60:], embedding[:60].mean(0).expand(4, -1))
    assert (model.inner.lm_head.weight is embedding) == tied


def test_a_part_without_weights_is_drawn_and_the_other_is_not(tmp_path: Path) -> None:
    _, causal = make_parts(tmp_path, vision="clip", language="llama")
    parts = {part: str(tmp_path / part) for part in ("vision", "language")}
    model = make(**parts, language_pretrained=parts["language"])
    fresh = make(**parts)
    for name, weight in model.inner.state_dict().items():
        if name.startswith("model.language_model.layers"):
            assert torch.equal(weight, causal.state_dict()[name.replace("language_model.", "")]), name
        elif "vision_tower" in name or "projector" in name:
            assert torch.equal(weight, fresh.inner.state_dict()[name]), name
    drawn = [weight.std() for name, weight in fresh.named_parameters() if name.endswith("proj.weight")]
    assert all(0.005 < std.item() < 0.5 for std in drawn), drawn


def test_a_batch_without_images_gives_the_tower_a_gradient_of_zero_as_ranks_wait_for_it(tmp_path: Path) -> None:
    """Where a rank has rows of text alone, the others would wait in a collective of the tower (llava_arch.py)."""
    model = make(name=str(write_llava(tmp_path)))
    model(torch.randint(60, (2, 10))).sum().backward()
    of_images = {name: each.grad for name, each in model.named_parameters() if "tower" in name or "projector" in name}
    unread = [name for name, grad in of_images.items() if grad is None]
    assert unread == [f"inner.model.vision_tower.post_layernorm.{kind}" for kind in ("weight", "bias")]
    assert all(grad.abs().max() == 0 for grad in of_images.values() if grad is not None)


def test_a_row_has_the_same_logits_whatever_other_rows_show(tmp_path: Path) -> None:
    model = make(name=str(write_llava(tmp_path))).eval()
    tokens, images = make_rows()
    together = model(tokens, images)
    for row, own in enumerate((images[:2], None, images[2:])):
        torch.testing.assert_close(model(tokens[row : row + 1], own)[0], together[row], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(model(tokens, images.flip(0)), together)


def test_more_tokens_of_images_than_features_are_an_error(tmp_path: Path) -> None:
    """Truncated images whose tokens stay would take features of other images (trl PR#5904)."""
    model = make(name=str(write_llava(tmp_path)))
    tokens, images = make_rows()
    with pytest.raises(IndexError, match="out of bounds"):
        model(tokens, images[:2])


@pytest.mark.parametrize(
    ("language", "said"),
    [
        ("gpt2", "has none"),
        ("gemma2", "changes the logits of its head"),
        ("phi", "has a bias in its head"),
        ("bert", "is an encoder"),
    ],
)
def test_a_language_model_that_transformers_would_not_hold_is_named(tmp_path: Path, language: str, said: str) -> None:
    from transformers import AutoConfig

    make_parts(tmp_path, vision="clip", language="llama")
    AutoConfig.for_model(language).save_pretrained(tmp_path / "other")
    sizes = {"image_token_id": 10, "vocab_size": AutoConfig.for_model(language).vocab_size}
    with pytest.raises(ConfigError, match=said) as caught:
        make(vision=str(tmp_path / "vision"), language=str(tmp_path / "other"), **sizes)
    assert caught.value.setting.startswith("model.language=")


def test_weights_of_another_type_are_refused(tmp_path: Path) -> None:
    make_parts(tmp_path, vision="clip", language="llama")
    parts = {part: str(tmp_path / part) for part in ("vision", "language")}
    with pytest.raises(ConfigError, match="of a model of type llama, and the part is a clip_vision_model"):
        make(**parts, vision_pretrained=parts["language"], language_pretrained=parts["language"])
    make_parts(tmp_path / "other", vision="clip", language="llama", rope_theta=500.0)
    with pytest.raises(ConfigError, match=r"rope_theta=500\.0, not 10000\.0"):
        make(**parts, language_pretrained=str(tmp_path / "other" / "language"))
    whole = write_llava(tmp_path / "whole")
    with pytest.raises(ConfigError, match=f"has {PATCHES}"):
        make(name=str(whole), image_seq_length=PATCHES + 1)
    assert read_llava_size(str(whole), None, None, "vocab_size") == VOCAB_SIZE


def test_buffers_that_a_language_model_was_saved_with_are_loaded(tmp_path: Path) -> None:
    """A router of experts without its biases would choose by whatever is in memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    make_parts(tmp_path, vision="clip", language="llama")
    sizes = {
        "num_hidden_layers": 2,
        "vocab_size": 60,
        "num_attention_heads": 2,
        "hidden_size": 32,
        "n_routed_experts": 4,
    }
    sizes |= {
        "num_key_value_heads": 2,
        "q_lora_rank": None,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
    }
    sizes |= {"v_head_dim": 8, "moe_intermediate_size": 16, "intermediate_size": 32, "n_group": 1, "topk_group": 1}
    sizes |= {"num_experts_per_tok": 2, "first_k_dense_replace": 1}
    causal: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3", **sizes))
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    causal.get_buffer(bias).fill_(0.625)
    causal.save_pretrained(tmp_path / "experts")
    parts = {"vision": str(tmp_path / "vision"), "language": str(tmp_path / "experts")}
    model = make(**parts, **{f"{part}_pretrained": place for part, place in parts.items()})
    found = model.inner.get_buffer(bias.replace("model.", "model.language_model.", 1))
    assert torch.equal(found, torch.full((4,), 0.625))


def test_tensors_of_a_language_model_without_a_place_are_refused(tmp_path: Path) -> None:
    make_parts(tmp_path, vision="clip", language="qwen2", tie_word_embeddings=True)
    parts = {part: str(tmp_path / part) for part in ("vision", "language")}
    weights = parts | {f"{part}_pretrained": place for part, place in parts.items()}
    file = tmp_path / "language" / "model.safetensors"
    saved = load_file(file)
    save_file(saved | {"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"q_norm\.weight, for which the model has no place") as caught:
        make(**weights)
    assert caught.value.setting == f"model.language_pretrained={parts['language']}"
    assert caught.value.fix.startswith("model.language_pretrained=<")
    save_file(saved | {"lm_head.weight": torch.ones(60, 32)}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lm_head\.weight"):
        make(**weights)


def test_weights_of_a_part_that_are_not_there_are_named_by_their_setting(tmp_path: Path) -> None:
    make_parts(tmp_path, vision="clip", language="llama")
    parts = {part: str(tmp_path / part) for part in ("vision", "language")}
    with pytest.raises(ConfigError) as caught:
        make(**parts, vision_pretrained=str(tmp_path / "nowhere"))
    assert caught.value.setting == f"model.vision_pretrained={tmp_path / 'nowhere'}"
    assert "model.vision_pretrained=" in caught.value.fix


def test_the_number_of_tokens_that_a_file_leaves_at_its_default_is_no_difference(tmp_path: Path) -> None:
    published = make_published(tmp_path / "one", vision="siglip_vision_model")
    config = write_llava(tmp_path / "other", vision="siglip_vision_model") / "config.json"
    config.write_text(config.read_text().replace('"image_seq_length": 4', '"image_seq_length": 576'))
    published.save_pretrained(tmp_path / "weights")
    (tmp_path / "weights" / "config.json").write_text(config.read_text())
    model = make(name=str(tmp_path / "one"), pretrained=str(tmp_path / "weights")).eval()
    tokens, images = make_rows()
    expected = published(input_ids=tokens, pixel_values=images).logits
    torch.testing.assert_close(model(tokens, images), expected, rtol=1e-5, atol=1e-5)
