"""CLIP and SigLIP of transformers: their logits, gradients, first weights, and files in and out."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers as hf
from safetensors.torch import load_file, save_file
from support import composed_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from recipes.blocks import list_blocks, named_blocks
from recipes.config.published import read_size
from recipes.errors import ConfigError
from recipes.model.flops import flops_per_sample
from recipes.model.image_text import TransformersImageText
from recipes.model.weights import await_checkpoint, initialize
from recipes.model.weights.huggingface import export_pretrained
from recipes.transform.published import Pixels

_END = 3  # token that ends a caption, and pads it
_IDS = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": _END, "pad_token_id": _END}
_SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**_IDS, **_SIZE, "max_position_embeddings": 12}
IMAGES = {**_SIZE, "image_size": 16, "patch_size": 8}
_OLD_IDS = {"eos_token_id": 2, "pad_token_id": 1}  # of OpenAI's, in which the end is the largest id


def _clip(**ids: int) -> Any:
    return hf.CLIPConfig(text_config={**TEXT, **ids}, vision_config=IMAGES, projection_dim=24)


CONFIGS: dict[str, Any] = {
    "clip": _clip,
    "clip_old": lambda: _clip(**_OLD_IDS),
    "siglip": lambda: hf.SiglipConfig(text_config=TEXT, vision_config=IMAGES),
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a model of transformers by its kind, and the folder that it was saved in."""
    made: dict[str, tuple[Any, str]] = {}

    def make(kind: str) -> tuple[Any, str]:
        if kind not in made:
            torch.manual_seed(0)
            model = hf.AutoModel.from_config(CONFIGS[kind]()).eval()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if name.startswith("logit"):
                        parameter.fill_(1.5)
                    elif parameter.dim() == 1:
                        parameter.add_(torch.randn_like(parameter), alpha=0.1)
            folder = tmp_path_factory.mktemp(kind)
            model.save_pretrained(folder)
            made[kind] = model, str(folder)
        return made[kind]

    return make


def on_meta(folder: str, **changes: Any) -> TransformersImageText:
    settings: dict[str, Any] = dict.fromkeys(("pretrained", "max_seq_len", "image_size", "in_channels", "vocab_size"))
    with torch.device("meta"):
        return TransformersImageText(name=folder, **(settings | changes))


def model_of(folder: str, *, pretrained: str | None, seed: int = 0) -> TransformersImageText:
    model = on_meta(folder, pretrained=pretrained)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(torch.nan)
    initialize(model, seed=seed)
    return model.eval()


def images() -> Tensor:
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def captions(kind: str = "clip") -> tuple[Tensor, Tensor]:
    """Return three captions of 4, 12 and 7 tokens, padded to 12, and which tokens are no padding."""
    end = 63 if kind == "clip_old" else _END
    tokens = torch.randint(4, 63, (3, 12), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([[4], [12], [7]])
    places = torch.arange(12)
    return tokens.masked_fill(places >= lengths - 1, end), places < lengths


def logits_of(model: TransformersImageText, kind: str) -> Tensor:
    """Return the logits of all images and captions as transformers computes them, [3, 3]."""
    of_images, of_captions, log_scale, bias = model(images(), *captions(kind))
    assert of_images is not None
    assert of_captions is not None
    cosines: Tensor = F.normalize(of_images, dim=-1) @ F.normalize(of_captions, dim=-1).T
    return cosines * log_scale.exp() + bias


def logits_of_transformers(model: Any, kind: str) -> Tensor:
    tokens, is_token = captions(kind)
    mask = {} if kind == "siglip" else {"attention_mask": is_token.long()}  # SigLIP was trained without
    logits: Tensor = model(input_ids=tokens, pixel_values=images(), **mask).logits_per_image
    return logits


@pytest.mark.parametrize("kind", CONFIGS)
def test_loaded_weights_give_the_logits_and_gradients_of_transformers(kind: str, published: Any) -> None:
    reference, folder = published(kind)
    model = model_of(folder, pretrained=folder)
    logits, expected = logits_of(model, kind), logits_of_transformers(reference, kind)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert expected.std() > 0.1
    weights = torch.randn(3, 3, generator=torch.Generator().manual_seed(2))
    for each, of in ((logits, model), (expected, reference)):
        of.zero_grad()
        (each * weights).sum().backward()
    theirs = dict(reference.named_parameters())
    for name, parameter in model.inner.named_parameters():
        assert parameter.grad is not None, name
        gradient = theirs.pop(name).grad
        torch.testing.assert_close(parameter.grad.view_as(gradient), gradient, rtol=1e-5, atol=1e-5)
    assert not theirs


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_export_is_loaded_by_transformers_bit_for_bit(kind: str, published: Any, tmp_path: Path) -> None:
    reference, folder = published(kind)
    export_pretrained(model_of(folder, pretrained=folder), tmp_path)
    loaded = type(reference).from_pretrained(tmp_path)
    for name, parameter in reference.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    assert torch.equal(logits_of_transformers(loaded.eval(), kind), logits_of_transformers(reference, kind))
    again = model_of(str(tmp_path), pretrained=str(tmp_path))
    assert torch.equal(logits_of(again, kind), logits_of(model_of(folder, pretrained=folder), kind))


def test_the_tokenizer_of_an_export_ends_captions_where_the_model_reads_them(published: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(published("clip")[1], source)
    words = {word: id for id, word in enumerate(["a", "<s>", "photo", "</s>", "of", "dogs", "<pad>"])}
    backend = Tokenizer(WordLevel(words, unk_token="a"))
    backend.pre_tokenizer = Whitespace()
    backend.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 3)])
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.save_pretrained(source)
    export_pretrained(model_of(str(source), pretrained=str(source)), tmp_path / "export")
    loaded = hf.AutoTokenizer.from_pretrained(tmp_path / "export")
    assert loaded("photo of dogs").input_ids == tokenizer("photo of dogs").input_ids == [1, 2, 4, 5, 3]


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_first_weights_follow_the_rules_of_the_model_and_the_seed_alone(kind: str, published: Any) -> None:
    _, folder = published(kind)
    model, again, other = (model_of(folder, pretrained=None, seed=seed) for seed in (0, 0, 1))
    torch.manual_seed(1)
    expected = dict(hf.AutoModel.from_config(CONFIGS[kind]()).named_parameters())
    for name, parameter in model.inner.named_parameters():
        assert torch.equal(parameter, again.inner.get_parameter(name)), name
        if name.startswith("logit"):
            continue
        if not expected[name].detach().std() > 0:
            assert torch.equal(parameter, expected[name]), name  # zeros or ones
            continue
        assert not torch.equal(parameter, other.inner.get_parameter(name)), name
        # of n samples, 4 standard errors of either standard deviation
        tolerance = 4 * math.sqrt(2 / (2 * parameter.numel()))
        assert parameter.std().item() == pytest.approx(expected[name].std().item(), rel=tolerance), name
    for name, buffer in model.inner.named_buffers():
        assert torch.equal(buffer[0], torch.arange(buffer.shape[1])), name
    log_scale, bias = model.scalars()
    if kind == "clip":
        assert bias is None
        assert log_scale.item() == pytest.approx(math.log(1 / 0.07), abs=1e-4)  # config.json has 2.6592
    else:
        assert bias is not None
        assert (log_scale.exp().item(), bias.item()) == pytest.approx((10.0, -10.0))


def test_what_is_not_given_is_not_read_and_has_no_features(published: Any) -> None:
    model = model_of(published("clip")[1], pretrained=published("clip")[1])
    both = model(images(), *captions())
    of_images, none, *_ = model(images(), None, None)
    assert none is None
    assert torch.equal(of_images, both[0])
    none, of_captions, log_scale, bias = model(None, *captions())
    assert none is None
    assert torch.equal(of_captions, both[1])
    assert (log_scale.tolist(), bias.tolist()) == ([1.5], [0.0])
    assert log_scale.data_ptr() != model.inner.logit_scale.data_ptr(), "engines free the parameter"


def test_only_a_scale_without_a_bias_has_bounds(published: Any) -> None:
    """Published SigLIP models have scales above 100, which the first step must not cut."""
    assert on_meta(published("clip")[1]).bounds() == {"inner.logit_scale": (0.0, math.log(100))}
    assert on_meta(published("siglip")[1]).bounds() == {}


def test_padding_of_clip_changes_no_feature_and_that_of_siglip_does(published: Any) -> None:
    for kind, changes in (("clip", False), ("siglip", True)):
        folder = published(kind)[1]
        model = model_of(folder, pretrained=folder)
        tokens, is_token = captions()
        other = tokens.masked_fill(~is_token, 9)
        before, after = (model(None, each, is_token)[1] for each in (tokens, other))
        assert torch.equal(before, after) is not changes


def test_sizes_are_those_of_config_json(published: Any) -> None:
    for kind, size in (("clip", 24), ("siglip", 32)):
        model = on_meta(published(kind)[1])
        assert (model.vocab_size, model.max_seq_len, model.image_size, model.in_channels) == (64, 12, 16, 3)
        assert model.projection_size == size
    assert on_meta(published("clip")[1], max_seq_len=8).max_seq_len == 8
    assert {name: len(tower) for name, tower in named_blocks(model).items()} == {
        "inner.vision_model.encoder.layers": 2,
        "inner.text_model.encoder.layers": 2,
    }


def test_a_model_of_gray_images_is_given_gray_images(tmp_path: Path) -> None:
    config = hf.CLIPConfig(text_config=TEXT | {"vocab_size": 512}, vision_config=IMAGES | {"num_channels": 1})
    config.save_pretrained(tmp_path)
    typed = ["recipe=clip_scenes", f"model.name={tmp_path}", "model.max_seq_len=12"]
    composed = composed_config(*typed)
    assert (composed["model"]["in_channels"], composed["transform"]["in_channels"]) == (1, 1)
    assert on_meta(str(tmp_path), in_channels=1).in_channels == 1
    model = model_of(str(tmp_path), pretrained=None)
    pixels: dict[str, Any] = {
        "size": 16,
        "eval_size": 16,
        "eval_crop": 1.0,
        "interpolation": "bicubic",
        "crop_mode": "center",
    }
    export_pretrained(model, tmp_path / "export", pixels=Pixels(**pixels, mean=[0.5], std=[0.5]))
    assert not (tmp_path / "export" / "preprocessor_config.json").exists(), "it would make three channels"
    with pytest.raises(ConfigError, match=r"model\.in_channels=3: the patches of config.json have 1; type"):
        on_meta(str(tmp_path), in_channels=3)


@pytest.mark.parametrize(("kind", "of"), [("clip", hf.CLIPConfig), ("siglip", hf.SiglipConfig)])
def test_sizes_that_a_file_leaves_out_are_the_defaults_of_transformers(kind: str, of: Any, tmp_path: Path) -> None:
    config = {"model_type": kind, "text_config": {"model_type": f"{kind}_text_model"}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_size(str(tmp_path), "vocab_size") == of().text_config.vocab_size
    assert read_size(str(tmp_path), "max_position_embeddings") == of().text_config.max_position_embeddings
    assert read_size(str(tmp_path), "image_size") == of().vision_config.image_size
    assert read_size(str(tmp_path), "num_channels") == of().vision_config.num_channels


def _text(**changes: Any) -> dict[str, Any]:
    return {"text_config": TEXT | changes}


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        ({"model_type": "llama"}, {}, "of type llama is neither of type clip nor siglip; type model.name=<folder or"),
        ({"model_type": "siglip2"}, {}, "of type siglip2 is neither of type clip nor siglip; type .* CLIP or SigLIP"),
        ({"model_type": "chinese_clip"}, {}, "of type chinese_clip is neither of type clip nor siglip"),
        ({"model_type": "altclip"}, {}, "of type altclip is neither of type clip nor siglip"),
        ({"model_type": "clip", "quantization_config": {"quant_method": "fp8"}}, {}, "its weights are quantized"),
        ({"model_type": "clip", **_text(num_hidden_layers=2000)}, {}, "2,000 layers, of which 1,024 are the most"),
        (
            {"model_type": "clip", **_text(layer_norm_eps=-1.0)},
            {},
            r"text_config\.layer_norm_eps=-1\.0, which no",
        ),
        ({"model_type": "clip", **_text(attention_dropout=2.0)}, {}, r"text_config\.attention_dropout=2\.0, which no"),
        (
            {"model_type": "clip", **_text(hidden_act="nope")},
            {},
            r"text_config\.hidden_act=\"nope\", which trans",
        ),
        ({"model_type": "clip", **_text(num_attention_heads=5)}, {}, "config.json"),
        ({"model_type": "siglip", **_text(projection_size=16)}, {}, "its captions have 16 features, and its images 32"),
        (
            {"model_type": "siglip", "vision_config": IMAGES | {"vision_use_head": False}},
            {},
            r"vision_use_head=false, without which an image has no features",
        ),
        (
            {"model_type": "clip", "vision_config": IMAGES | {"image_size": [16, 8]}},
            {},
            r"vision_config\.image_size=\[16, 8\], which is not one number",
        ),
        ({"model_type": "clip", "vision_config": IMAGES | {"patch_size": 32}}, {}, "16 pixels a side, and a patch 32"),
        (
            {"model_type": "clip"},
            {"image_size": 32},
            r"model\.image_size=32: each patch has a position .* images of 16 pixels; type model\.image_size=16",
        ),
        ({"model_type": "clip"}, {"max_seq_len": 13}, r"max_seq_len=13: the model has 12 positions; type .*=12"),
        ({"model_type": "siglip"}, {"max_seq_len": 8}, r"max_seq_len=8: SigLIP reads a caption at its last .*=12"),
        ({"model_type": "clip"}, {"vocab_size": 65}, r"vocab_size=65: config\.json has 64 tokens; type .*=64"),
    ],
)
def test_what_cannot_be_trained_is_refused(config: Any, settings: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**_text(), "vision_config": IMAGES, **config}))
    with pytest.raises(ConfigError, match=message):
        on_meta(str(tmp_path), **settings)


def _copy(folder: str, to: Path, **changes: Tensor | None) -> str:
    tensors = load_file(Path(folder) / "model.safetensors") | changes
    save_file({name: value for name, value in tensors.items() if value is not None}, to / "model.safetensors")
    (to / "config.json").write_text((Path(folder) / "config.json").read_text())
    return str(to)


def test_files_of_other_programs_have_positions_and_scalars_in_any_shape(published: Any, tmp_path: Path) -> None:
    _, folder = published("clip")
    positions = {"text_model.embeddings.position_ids": torch.arange(12)[None]}
    other = _copy(folder, tmp_path, **positions, logit_scale=torch.tensor([1.5]))
    one, same = (logits_of(model_of(each, pretrained=each), "clip") for each in (folder, other))
    assert torch.equal(one, same)


def test_damaged_files_are_refused_and_not_completed_at_random(published: Any, tmp_path: Path) -> None:
    _, folder = published("siglip")
    name = "vision_model.head.probe"
    with pytest.raises(ConfigError, match=rf"its files do not have {name}; type model\.pretrained=<a complete copy"):
        model_of(folder, pretrained=_copy(folder, tmp_path, **{name: None}))
    with pytest.raises(ConfigError, match=rf"holds NaN, inf or a value above float32 in {name}"):
        model_of(folder, pretrained=_copy(folder, tmp_path, **{name: torch.full((1, 1, 32), torch.nan)}))
    with pytest.raises(ConfigError, match="it has logit_shift, for which the model has no place"):
        model_of(folder, pretrained=_copy(folder, tmp_path, logit_shift=torch.ones(1)))
    (tmp_path / "model.safetensors").write_bytes((Path(folder) / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(ConfigError, match=r"type model\.pretrained=<a complete copy of it>"):
        model_of(folder, pretrained=str(tmp_path))


def test_weights_of_another_tower_are_refused(published: Any, tmp_path: Path) -> None:
    _, folder = published("clip")
    other = _copy(folder, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["hidden_act"] = "gelu"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r'vision_config\.hidden_act="gelu", not "quick_gelu"'):
        model_of(folder, pretrained=other)
    with pytest.raises(ConfigError, match="the weights are of a model of type siglip, and model.name is one of clip"):
        model_of(folder, pretrained=published("siglip")[1])


def test_a_checkpoint_that_follows_needs_no_first_weights_but_the_positions(published: Any) -> None:
    model = on_meta(published("siglip")[1])
    model.to_empty(device="cpu")
    await_checkpoint(model, 0)
    assert all(parameter.isnan().all() for parameter in model.parameters())
    for name, buffer in model.inner.named_buffers():
        assert torch.equal(buffer[0], torch.arange(buffer.shape[1])), name


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_flops_are_those_of_all_products_of_both_towers(kind: str, published: Any) -> None:
    model = on_meta(published(kind)[1])
    block, attention = 4 * 32 * 32 + 2 * 32 * 48, 12 * 2 * 32  # parameters; FLOPs of a token for each token
    patches = 5 if kind == "clip" else 4
    # every product with a weight 6, but no gradient of pixels
    expected = 2 * 6 * block * (patches + 12) + attention * (patches**2 + 12**2) + 4 * 4 * 192 * 32
    if kind == "clip":
        expected += 2 * 6 * 32 * 24
    else:  # the head of captions, and the attention of a probe to all patches with its MLP
        expected += 6 * 32 * 32 + 6 * (2 * 32 * 32 + 2 * 32 * 48) + 6 * patches * 2 * 32 * 32 + 12 * patches * 32
    flops = flops_per_sample(model, (3, 16, 16))
    assert flops is not None
    assert flops.palm == expected
    assert flops.palm - flops.causal == (attention * 12**2 / 2 if kind == "clip" else 0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith("inner.vision_model."))
    frozen = flops_per_sample(model, (3, 16, 16))
    assert frozen is not None
    assert 0.5 < frozen.palm / flops.palm < 0.95, "a frozen tower has no backward pass"


def test_layers_of_both_towers_end_together_below_the_projections(published: Any) -> None:
    model = on_meta(published("siglip")[1])
    numbers = model.number_layers()
    assert numbers.keys() == dict(model.named_parameters()).keys()
    for tower in ("inner.vision_model", "inner.text_model"):
        assert numbers[f"{tower}.embeddings.position_embedding.weight"] == 0
        assert [numbers[f"{tower}.encoder.layers.{index}.layer_norm1.weight"] for index in range(2)] == [1, 2]
    assert numbers["inner.text_model.final_layer_norm.weight"] == 2
    assert numbers["inner.text_model.head.weight"] == numbers["inner.logit_bias"] == 3


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@pytest.mark.usefixtures("one_rank")
def test_sharded_it_has_the_same_features_and_gradients(kind: str, published: Any) -> None:
    _, folder = published(kind)
    whole, sharded = model_of(folder, pretrained=folder), on_meta(folder, pretrained=folder)
    mesh = init_device_mesh("cpu", (1,))
    for block in list_blocks(sharded):
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    sharded.to_empty(device="cpu")
    initialize(sharded, 0)
    for model in (whole, sharded):
        logits_of(model, kind).square().sum().backward()
    for (name, one), other in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        assert one.grad is not None
        assert torch.equal(one.grad, other.grad.full_tensor()), name  # type: ignore[union-attr]
