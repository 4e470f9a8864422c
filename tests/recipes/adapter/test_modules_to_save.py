"""Modules trained in full beside an adapter: first the base's weights to the bit, then files with which peft agrees."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from vision_language_cases import IMAGE_SIZE, IMAGE_TOKEN, PATCHES, make_llava, write_llava

from recipes.adapter import is_adapter, list_targets, list_trained_beside, switched_off
from recipes.adapter.lora import Lora
from recipes.blocks import list_blocks
from recipes.errors import ConfigError
from recipes.model.huggingface import HuggingFace
from recipes.model.llava import Llava
from recipes.model.weights import initialize, restore_precision
from recipes.model.weights.adapter import merge_adapter
from recipes.model.weights.huggingface import export_pretrained
from recipes.model.weights.peft_folder import save_adapter
from recipes.numerics.nf4 import is_nf4, list_nf4

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8.0, "lora_dropout": 0.0, "target_modules": "all", "use_rslora": False}
LORA |= {"use_dora": False}
PROJECTOR = "multi_modal_projector"


def randomize(model: nn.Module) -> None:
    """Give a model larger weights than it begins with, so that differences show in its logits."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A published LLaVA model, a Llama, and one whose head is its embedding."""
    folders = {name: str(tmp_path_factory.mktemp(name)) for name in ("llava", "llama", "tied")}
    write_llava(Path(folders["llava"]))
    model: Any = hf.LlavaForConditionalGeneration(hf.AutoConfig.from_pretrained(folders["llava"]))
    randomize(model)
    model.save_pretrained(folders["llava"])
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    for name in ("llama", "tied"):
        is_tied = name == "tied"
        config = hf.LlamaConfig(vocab_size=64, **size, max_position_embeddings=64, tie_word_embeddings=is_tied)
        model = hf.AutoModelForCausalLM.from_config(config)
        randomize(model)
        model.save_pretrained(folders[name])
    return folders


def make(folder: str, adapter: Lora | None) -> Any:
    with torch.device("meta"):
        model: Any
        if "llava" in folder:
            model = make_llava(Path(folder), pretrained=folder)
        else:
            model = HuggingFace(name=folder, pretrained=folder, max_seq_len=64, vocab_size=64)
        if adapter is not None:
            adapter.apply(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            if not is_nf4(parameter):
                parameter.fill_(torch.nan)
    initialize(model, seed=0)  # type: ignore[arg-type]
    return model.eval()


def lora(*modules: str, **more: Any) -> Lora:
    return Lora(**LORA, modules_to_save=[*modules], **more)


def run(model: Any) -> Tensor:
    """Return the logits of two rows, [2, 12, V], each with an image if the model reads any."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 60, (2, 12), generator=generator)
    images = torch.randn(2, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator)
    is_ours = isinstance(model, Llava | HuggingFace)
    if "vision_config" in (model.inner if is_ours else model).config.to_dict():
        tokens[:, :PATCHES] = IMAGE_TOKEN
        found = model(tokens, images=images) if is_ours else model(input_ids=tokens, pixel_values=images)
    else:
        found = model(tokens)
    logits: Tensor = found if is_ours else found.logits
    return logits


def change(model: nn.Module) -> None:
    """Set what is trained to what training could have made of it."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def make_base(folder: str) -> Any:
    kind = hf.LlavaForConditionalGeneration if "llava" in folder else hf.AutoModelForCausalLM
    return kind.from_pretrained(folder).eval()


CASES = {"llava": (PROJECTOR,), "llama": ("lm_head", "model.norm"), "tied": ("lm_head", "embed_tokens")}


@pytest.mark.parametrize("name", CASES)
def test_what_has_not_learned_is_the_base_to_the_bit(name: str, published: dict[str, str]) -> None:
    plain, model = make(published[name], None), make(published[name], lora(*CASES[name]))
    assert torch.equal(run(model), run(plain))
    with switched_off(model):
        assert torch.equal(run(model), run(plain))


@pytest.mark.parametrize("name", CASES)
def test_the_adapter_and_the_modules_are_trained_and_nothing_else(name: str, published: dict[str, str]) -> None:
    model = make(published[name], lora(*CASES[name]))
    change(model)
    run(model).logsumexp(-1).sum().backward()
    beside = list_trained_beside(model)
    for end in CASES[name]:
        assert any(f".{end}." in each for each in beside), end
    for own, parameter in model.named_parameters():
        assert parameter.requires_grad == (is_adapter(own) or own in beside), own
        assert (parameter.grad is not None) == parameter.requires_grad, own


@pytest.mark.parametrize("name", CASES)
def test_peft_has_the_logits_and_gradients_of_what_is_saved(
    name: str, published: dict[str, str], tmp_path: Path
) -> None:
    model = make(published[name], lora(*CASES[name]))
    change(model)
    save_adapter(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(make_base(published[name]), str(tmp_path), is_trainable=True).eval()
    logits, expected = run(model), run(theirs)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)  # float32 sums in another order
    logits.logsumexp(-1).sum().backward()
    expected.logsumexp(-1).sum().backward()
    of_peft = {each.replace(".modules_to_save.default", ""): p.grad for each, p in theirs.named_parameters()}
    names: dict[nn.Parameter, list[str]] = {}
    for own, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(own)
    for parameter, own_names in names.items():
        if parameter.requires_grad:  # of a tied weight peft trains a copy for each of its names
            parts = [of_peft[f"base_model.model.{own.removeprefix('inner.')}"] for own in own_names]
            torch.testing.assert_close(parameter.grad, torch.stack(parts).sum(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_what_was_saved_is_what_another_run_begins_with(name: str, published: dict[str, str], tmp_path: Path) -> None:
    model = make(published[name], lora(*CASES[name]))
    change(model)
    save_adapter(model, tmp_path)
    assert torch.equal(run(make(published[name], lora(*CASES[name], pretrained=str(tmp_path)))), run(model))
    with pytest.raises(ConfigError, match="it was trained with adapter.modules_to_save=") as error:
        make(published[name], lora(pretrained=str(tmp_path)))
    named = error.value.fix.partition("[")[2].rstrip("]").split(",")
    assert torch.equal(run(make(published[name], lora(*named, pretrained=str(tmp_path)))), run(model)), "as advised"


@pytest.mark.parametrize("name", CASES)
def test_merged_weights_have_the_logits_of_the_model(name: str, published: dict[str, str], tmp_path: Path) -> None:
    model = make(published[name], lora(*CASES[name]))
    change(model)
    expected = run(model)
    merge_adapter(model)
    torch.testing.assert_close(run(model), expected, rtol=1e-5, atol=1e-5)
    export_pretrained(model, tmp_path)
    loaded = (hf.LlavaForConditionalGeneration if name == "llava" else hf.AutoModelForCausalLM).from_pretrained(
        tmp_path
    )
    torch.testing.assert_close(run(loaded.eval()), expected, rtol=1e-5, atol=1e-5)


def test_an_adapter_of_llava_is_one_of_its_language_model(published: dict[str, str]) -> None:
    model = make(published["llava"], None)
    adapted = list_targets(model)
    assert len(adapted) == 2 * 7, "seven layers of two blocks"
    assert all(name.startswith("inner.model.language_model.layers.") for name in adapted)
    assert len(list_blocks(model)) > 2, "the blocks of the tower are blocks, too"


def test_merging_into_weights_from_before_quantization_keeps_what_was_trained(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "llava wide"
    write_llava(folder, hidden_size=64, num_attention_heads=1)
    model: Any = hf.LlavaForConditionalGeneration(hf.AutoConfig.from_pretrained(folder))
    model.save_pretrained(folder)
    ours = make(str(folder), lora(PROJECTOR, quantization="nf4"))
    towers = [name for name, _ in list_nf4(ours) if "vision_tower" in name]
    assert not towers, "weights of the tower are not in 4 bits"
    assert any(list_nf4(ours))
    change(ours)
    trained = {name: ours.get_parameter(name).clone() for name in list_trained_beside(ours)}
    assert restore_precision(ours, 0) is not None
    for name, values in trained.items():
        assert torch.equal(ours.get_parameter(name), values), name


def test_what_cannot_be_trained_beside_an_adapter_is_refused(published: dict[str, str]) -> None:
    cases = {
        ("llava", "projektor"): "no module of .* ends with projektor; type adapter.modules_to_save=",
        ("llava", "language_model"): "is adapted, and its weights stay frozen",
        ("llama", "q_proj"): "is adapted, and its weights stay frozen",
        ("tied", "lm_head"): r"type adapter.modules_to_save=\[lm_head,model.embed_tokens\]",
        ("tied", "embed_tokens"): r"type adapter.modules_to_save=\[model.embed_tokens,lm_head\]",
    }
    for (name, module), message in cases.items():
        with pytest.raises(ConfigError, match=message):
            make(published[name], lora(module))


def test_two_weights_that_peft_trained_apart_are_not_taken_for_one(published: dict[str, str], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(**settings, modules_to_save=["lm_head", "embed_tokens"])
    theirs = peft.get_peft_model(make_base(published["tied"]), config)
    change(theirs)
    theirs.save_pretrained(str(tmp_path))
    adapter = Lora(
        **LORA | {"target_modules": ["q_proj"]}, modules_to_save=["lm_head", "embed_tokens"], pretrained=str(tmp_path)
    )
    with pytest.raises(ConfigError, match="are one weight of the model, and were trained apart"):
        make(published["tied"], adapter)
