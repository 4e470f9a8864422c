"""Any model of transformers: its logits, its first weights, packed documents, generation, and files in and out."""

import contextlib
import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from one_text import generate, generate_rows
from safetensors.torch import load_file, save_file
from torch import Tensor

from recipes.errors import ConfigError
from recipes.generation import Sampling
from recipes.model.flops import flops_per_sample
from recipes.model.huggingface import HuggingFace
from recipes.model.transformers_models import COMPARED
from recipes.model.weights import await_checkpoint, initialize
from recipes.model.weights.huggingface import export_pretrained

_IDS = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64}
_SIZE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_GROUPED = {**_IDS, **_SIZE, "num_key_value_heads": 2}
_WINDOW = {"head_dim": 8, "sliding_window": 8}
CONFIGS: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**_GROUPED, tie_word_embeddings=True),
    "gpt2": lambda: hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **_IDS),
    "qwen2": lambda: hf.Qwen2Config(**_GROUPED),
    "qwen3": lambda: hf.Qwen3Config(**_GROUPED, head_dim=8),
    "mistral": lambda: hf.MistralConfig(**_GROUPED, **_WINDOW),
    "gemma2": lambda: hf.Gemma2Config(**_GROUPED, **_WINDOW, query_pre_attn_scalar=8),
    "gemma3": lambda: hf.Gemma3TextConfig(**_GROUPED, **_WINDOW),
    "phi3": lambda: hf.Phi3Config(**_GROUPED, pad_token_id=0),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**_IDS, **_SIZE),
    "mixtral": lambda: hf.MixtralConfig(**_GROUPED, num_local_experts=4),
}
_LIKE_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_IDS_OF_GPT2 = {key: _IDS[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
OTHERS: dict[str, Any] = {
    **{
        name.lower(): functools.partial(getattr(hf, f"{name}Config"), **_GROUPED, pad_token_id=0)
        for name in (
            *("Arcee", "Cohere", "Cohere2", "Ernie4_5", "Exaone4", "Gemma", "Glm", "Glm4", "Granite", "GraniteMoe"),
            *("Nemotron", "Olmo", "Olmo2", "Olmoe", "Persimmon", "Phi", "Qwen2Moe", "Qwen3Moe", "SmolLM3"),
            *("StableLm", "Starcoder2"),
        )
    },
    "gptj": lambda: hf.GPTJConfig(**_LIKE_GPT2, **_IDS_OF_GPT2, rotary_dim=4),
    "codegen": lambda: hf.CodeGenConfig(**_LIKE_GPT2, **_IDS_OF_GPT2, rotary_dim=4),
    "gpt_bigcode": lambda: hf.GPTBigCodeConfig(**_LIKE_GPT2, **_IDS_OF_GPT2),
}
LENGTHS = [[10, 14], [3, 21]]  # of the documents of two rows
PROMPTS = [[5, 6, 7], [9], [3] * 12]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a model of transformers by its kind, and the folder that it was saved in."""
    made: dict[str, tuple[Any, str]] = {}

    def make(kind: str) -> tuple[Any, str]:
        if kind not in made:
            torch.manual_seed(0)
            model = hf.AutoModelForCausalLM.from_config((CONFIGS | OTHERS)[kind]()).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() == 2:
                        parameter.mul_(3)  # logits that depend on the whole context
            folder = tmp_path_factory.mktemp(kind)
            model.save_pretrained(folder)
            made[kind] = model, str(folder)
        return made[kind]

    return make


def model_of(folder: str, *, pretrained: str | None, seed: int = 0) -> HuggingFace:
    with torch.device("meta"):
        model = HuggingFace(name=folder, pretrained=pretrained, max_seq_len=64, vocab_size=64)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(torch.nan)
    initialize(model, seed=seed)  # type: ignore[arg-type]
    return model.eval()


def tokens() -> Tensor:
    return torch.randint(3, 64, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", CONFIGS)
def test_loaded_weights_give_the_logits_and_gradients_of_transformers(kind: str, published: Any) -> None:
    reference, folder = published(kind)
    model = model_of(folder, pretrained=folder)
    assert torch.equal(model(tokens()), reference(tokens()).logits)
    gradients = []
    for each in (model, reference):
        each.zero_grad()
        logits = each(tokens())
        (logits if isinstance(logits, Tensor) else logits.logits).logsumexp(-1).sum().backward()
        gradients.append({name.removeprefix("inner."): p.grad for name, p in each.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_packed_documents_have_the_logits_of_documents_alone(kind: str, published: Any) -> None:
    reference, folder = published(kind)
    model = model_of(folder, pretrained=folder)
    positions = torch.cat([torch.arange(length) for row in LENGTHS for length in row]).view(2, 24)
    together = model(tokens(), positions=positions)
    for row, lengths in enumerate(LENGTHS):
        parts = tokens()[row].split(lengths)
        alone = torch.cat([reference(document[None]).logits[0] for document in parts])
        torch.testing.assert_close(together[row], alone, rtol=1e-5, atol=5e-6)  # float32, logits of order 1
    assert (model(tokens()) - together).abs().max() > 0.1


def test_what_is_said_to_be_compared_is_compared_here() -> None:
    assert {make().model_type for make in (CONFIGS | OTHERS).values()} == COMPARED


@pytest.mark.parametrize("kind", OTHERS)
def test_other_architectures_have_their_logits_alone_and_packed(kind: str, published: Any) -> None:
    reference, folder = published(kind)
    model = model_of(folder, pretrained=folder)
    # products of linear layers in another kernel where the processor has a faster one
    torch.testing.assert_close(model(tokens()), reference(tokens()).logits, rtol=1e-5, atol=1e-5)
    positions = torch.cat([torch.arange(length) for row in LENGTHS for length in row]).view(2, 24)
    together = model(tokens(), positions=positions)
    for row, lengths in enumerate(LENGTHS):
        parts = tokens()[row].split(lengths)
        alone = torch.cat([reference(document[None]).logits[0] for document in parts])
        torch.testing.assert_close(together[row], alone, rtol=1e-5, atol=1e-5)


def test_an_architecture_that_was_not_compared_is_neither_packed_nor_cut(
    published: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = hf.OPTConfig(**_IDS, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4)
    reference = hf.AutoModelForCausalLM.from_config(config).eval()
    reference.save_pretrained(tmp_path)
    with caplog.at_level("WARNING", "lightning_recipes"):
        model = model_of(str(tmp_path), pretrained=str(tmp_path))
    assert "Models of type opt were not compared with transformers" in caplog.text
    assert not model.computes_loss_in_chunks
    assert not model.keeps_documents_apart
    torch.testing.assert_close(model(tokens()), reference(tokens()).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"model_type": "bert", "vocab_size": 64},
            "a model of type bert is an encoder, in which a token sees those after it",
        ),
        ({"model_type": "resnet"}, "a model of type resnet is no causal language model"),
        (
            {"model_type": "t5", "vocab_size": 64},
            "a model of type t5 has an encoder of another input before its decoder",
        ),
        ({"model_type": "nope"}, "knows no models of type nope; type .*, or pip install -U transformers if it is new"),
        ({"model_type": "nope", "auto_map": {"AutoConfig": "c.C"}}, "type nope, and code of the repository is not run"),
        ({"model_type": "gemma3", "text_config": {"vocab_size": 64}}, "a model of type gemma3 reads more than text"),
        (
            {"model_type": "llama", "vocab_size": 64, "quantization_config": {"quant_method": "fp8"}},
            "its weights are quantized",
        ),
    ],
)
def test_what_is_no_causal_model_in_full_precision_is_refused(config: Any, reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=reason):
        HuggingFace(name=str(tmp_path), pretrained=None, max_seq_len=64, vocab_size=64)


def test_rotary_frequencies_stay_float32_when_weights_do_not(published: Any) -> None:
    reference, folder = published("llama")
    model = model_of(folder, pretrained=folder).to(torch.bfloat16)
    assert next(model.parameters()).dtype == torch.bfloat16
    for name, buffer in model.inner.named_buffers():
        assert torch.equal(buffer, reference.get_buffer(name)), name


def test_files_without_a_weight_are_refused_and_not_completed_at_random(published: Any, tmp_path: Path) -> None:
    _, folder = published("qwen2")
    tensors = load_file(Path(folder) / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((Path(folder) / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"its files do not have model\.layers\.1\.mlp\.up_proj\.weight"):
        model_of(str(tmp_path), pretrained=str(tmp_path))


def test_weights_that_the_model_has_no_place_for_are_refused(published: Any, tmp_path: Path) -> None:
    _, folder = published("qwen2")
    tensors = load_file(Path(folder) / "model.safetensors") | {"model.layers.0.mlp.up_proj.weight_copy": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((Path(folder) / "config.json").read_text())
    with pytest.raises(ConfigError, match="it has .*weight_copy, for which the model has no place"):
        model_of(str(tmp_path), pretrained=str(tmp_path))


def test_an_export_keeps_the_settings_of_generation(published: Any, tmp_path: Path) -> None:
    _, folder = published("llama")
    source = tmp_path / "source"
    shutil.copytree(folder, source)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5], "temperature": 0.6}))
    export_pretrained(model_of(str(source), pretrained=str(source)), tmp_path / "export")
    written = json.loads((tmp_path / "export/generation_config.json").read_text())
    assert (written["eos_token_id"], written["temperature"]) == ([2, 5], 0.6)
    assert json.loads((tmp_path / "export/config.json").read_text())["use_cache"] is not False


def test_experts_are_exported_and_their_flops_left_to_a_counter(published: Any, tmp_path: Path) -> None:
    reference, folder = published("mixtral")
    model = model_of(folder, pretrained=folder)
    assert flops_per_sample(model, (16,)) is None
    export_pretrained(model, tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(tokens()).logits, reference(tokens()).logits)


@pytest.mark.filterwarnings("error")  # such as those of transformers about arguments that it renames
@pytest.mark.parametrize("kind", CONFIGS)
def test_text_is_the_same_with_and_without_a_cache_alone_and_in_a_batch(kind: str, published: Any) -> None:
    _, folder = published(kind)
    model = model_of(folder, pretrained=folder)
    greedy: dict[str, Any] = {"temperature": 0.0, "top_k": None, "top_p": None}
    alone = [generate(model, prompt, 8, **greedy, seed=0) for prompt in PROMPTS]
    assert alone == [generate(model, prompt, 8, **greedy, seed=0, use_cache=False) for prompt in PROMPTS]
    together = generate_rows(model, PROMPTS, 8, sampling=Sampling(temperature=0.0), seeds=range(3))
    assert alone == [answer.tokens for answer in together]


@pytest.mark.parametrize("kind", CONFIGS)
def test_first_weights_follow_the_model_and_the_seed_alone(kind: str, published: Any) -> None:
    reference, folder = published(kind)
    model, again, other = (model_of(folder, pretrained=None, seed=seed) for seed in (0, 0, 1))
    torch.manual_seed(1)
    expected = dict(hf.AutoModelForCausalLM.from_config(reference.config).named_parameters())
    for name, parameter in model.inner.named_parameters():
        assert torch.equal(parameter, again.inner.get_parameter(name))
        if parameter.dim() >= 2:
            assert not torch.equal(parameter, other.inner.get_parameter(name))
            # of at least 512 samples: 3 % is the standard error of a standard deviation
            assert parameter.std().item() == pytest.approx(expected[name].std().item(), rel=0.15), name
        else:
            assert torch.equal(parameter, expected[name]), name  # zeros or ones
    for name, buffer in model.inner.named_buffers():
        assert torch.equal(buffer, reference.get_buffer(name)), name


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_an_export_is_loaded_by_transformers_bit_for_bit(kind: str, published: Any, tmp_path: Path) -> None:
    reference, folder = published(kind)
    export_pretrained(model_of(folder, pretrained=folder), tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, parameter in reference.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)


def test_a_checkpoint_that_follows_needs_no_first_weights_but_the_buffers(published: Any) -> None:
    reference, folder = published("llama")
    with torch.device("meta"):
        model = HuggingFace(name=folder, pretrained=None, max_seq_len=64, vocab_size=64)
    model.to_empty(device="cpu")
    await_checkpoint(model, 0)  # type: ignore[arg-type]
    assert all(parameter.isnan().all() for parameter in model.parameters())
    for name, buffer in model.inner.named_buffers():
        assert torch.equal(buffer, reference.get_buffer(name))


def test_blocks_are_those_of_the_model_and_can_be_replaced(published: Any) -> None:
    _, folder = published("llama")
    model = model_of(folder, pretrained=folder)
    assert model.blocks is model.inner.model.layers
    model.blocks = torch.nn.ModuleList([model.blocks[0]])
    assert len(model.inner.model.layers) == 1
    assert not [name for name, _ in model.named_parameters() if name.startswith("blocks")], "in one place only"


@pytest.mark.parametrize(("kind", "in_chunks"), [("llama", True), ("gpt2", True), ("gemma2", False)])
def test_a_head_that_is_only_a_product_takes_a_loss_in_chunks(kind: str, in_chunks: bool, published: Any) -> None:
    """Gemma 2 caps its logits: a loss that computes them from the weight alone would be another one."""
    reference, folder = published(kind)
    model = model_of(folder, pretrained=folder)
    assert model.computes_loss_in_chunks is in_chunks
    if in_chunks:
        logits = model(tokens(), reduce=lambda hidden, weight: hidden @ weight.T)
        torch.testing.assert_close(logits, reference(tokens()).logits, rtol=1e-5, atol=1e-5)


def test_flops_are_counted_without_an_embedding_that_is_only_looked_up(published: Any) -> None:
    _, folder = published("qwen2")
    model = model_of(folder, pretrained=folder)
    num_parameters = sum(parameter.numel() for parameter in model.parameters()) - 64 * 32
    flops = model.flops_per_token(64)
    assert flops is not None
    assert flops.palm == 6 * num_parameters + 12 * 2 * 32 * 64
    assert flops.causal == 6 * num_parameters + 6 * 2 * 32 * 64
    assert model_of(published("mixtral")[1], pretrained=None).flops_per_token(64) is None, "not all experts compute"


def test_the_flops_of_blocks_without_attention_are_not_known(tmp_path: Path) -> None:
    hf.MambaConfig(**_IDS, hidden_size=32, num_hidden_layers=1).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = HuggingFace(name=str(tmp_path), pretrained=None, max_seq_len=64, vocab_size=64)
    assert model.flops_per_token(64) is None


def test_tensors_of_other_names_are_converted_with_a_line_that_says_so(
    published: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference, folder = published("mixtral")  # its file has a tensor for each expert
    with caplog.at_level("INFO", "lightning_recipes"):
        model = model_of(folder, pretrained=folder)
    assert "tensors in another way" in caplog.text
    assert torch.equal(model(tokens()), reference(tokens()).logits)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_seq_len": 65}, "model.max_seq_len=65: the model has 64 positions; type model.max_seq_len=64"),
        ({"vocab_size": 65}, "model.vocab_size=65: config.json has 64 tokens; type model.vocab_size=64"),
        ({"name": "/nonexistent"}, "model.name=/nonexistent: there is no such folder"),
    ],
)
def test_what_does_not_fit_is_named(settings: dict[str, Any], message: str, published: Any) -> None:
    arguments = {"name": published("llama")[1], "pretrained": None, "max_seq_len": 64, "vocab_size": 64} | settings
    with pytest.raises(ConfigError, match=message):
        HuggingFace(**arguments)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_head_of_its_own_in_files_that_are_said_to_be_tied_is_not_dropped(
    kind: str, published: Any, tmp_path: Path
) -> None:
    """transformers keeps such a head, with a warning; a model whose head is tied would have other logits."""
    reference, folder = published(kind)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    embedding = reference.get_input_embeddings().weight.detach()
    save_file(tensors | {"lm_head.weight": embedding.clone()}, file, metadata={"format": "pt"})
    assert torch.equal(model_of(str(tmp_path), pretrained=str(tmp_path))(tokens()), reference(tokens()).logits)
    save_file(tensors | {"lm_head.weight": embedding * 2}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"ties lm_head\.weight .*\"tie_word_embeddings\": false in its config.json"):
        model_of(str(tmp_path), pretrained=str(tmp_path))
    untied = str(shutil.copytree(tmp_path, tmp_path / "untied"))  # as advised; a process reads a config once
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "untied/config.json").write_text(json.dumps(config))
    kept = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(model_of(untied, pretrained=untied)(tokens()), kept(tokens()).logits)


def test_weights_that_are_quantized_without_scales_are_rejected(published: Any, tmp_path: Path) -> None:
    for kind in ("llama", "mixtral"):  # read tensor by tensor, and converted by transformers
        folder = tmp_path / kind
        shutil.copytree(published(kind)[1], folder)
        tensors = load_file(folder / "model.safetensors")
        name = next(name for name in tensors if name.endswith(("up_proj.weight", "w1.weight")))
        save_file(
            tensors | {name: tensors[name].to(torch.int8)}, folder / "model.safetensors", metadata={"format": "pt"}
        )
        with pytest.raises(ConfigError, match=f"holds {name} as int8: it is quantized"):
            model_of(str(folder), pretrained=str(folder))


def test_longrope_is_packed_as_long_as_its_frequencies_do_not_change(tmp_path: Path) -> None:
    """In transformers, one long example changes the frequencies of all others in a batch."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope |= {"original_max_position_embeddings": 24}
    torch.manual_seed(0)
    config = hf.Phi3Config(**_GROUPED, pad_token_id=0, rope_parameters=rope, original_max_position_embeddings=24)
    reference = hf.AutoModelForCausalLM.from_config(config).eval()
    reference.save_pretrained(tmp_path)
    options: dict[str, Any] = {"name": str(tmp_path), "pretrained": str(tmp_path), "vocab_size": 64}
    with pytest.raises(ConfigError, match=r"\(LongRoPE\) change for a whole batch.*type model\.max_seq_len=24$"):
        HuggingFace(**options, max_seq_len=25)
    model = HuggingFace(**options, max_seq_len=24)
    initialize(model, seed=0)
    positions = torch.cat([torch.arange(length) for row in LENGTHS for length in row]).view(2, 24)
    together = model.eval()(tokens(), positions=positions)
    for row, lengths in enumerate(LENGTHS):
        alone = torch.cat([reference(part[None]).logits[0] for part in tokens()[row].split(lengths)])
        torch.testing.assert_close(together[row], alone, rtol=1e-5, atol=1e-5)


BROKEN: dict[str, str | dict[str, Any]] = {
    "text": "{",
    "list": "[1]",
    "deep": "[" * 100_000,
    "no heads": {"num_attention_heads": 0},
    "three heads": {"num_attention_heads": 3},
    "activation": {"hidden_act": "evil"},
    "scaling": {"rope_parameters": 3},
    "million layers": {"num_hidden_layers": 10**6},
    "wide": {"hidden_size": 2**32, "head_dim": 2**32},
    "no layers": {"num_hidden_layers": 0},
    "negative": {"intermediate_size": -1},
    "kind": {"model_type": "nope"},
    "experts": {"model_type": "mixtral", "num_experts_per_tok": 9, "num_local_experts": 4},
    "positions": {"max_position_embeddings": 0},
    "theta": {"rope_parameters": {"rope_theta": -1.0, "rope_type": "default"}},
    "infinite theta": {"rope_parameters": {"rope_theta": float("inf"), "rope_type": "default"}},
    "epsilon": {"rms_norm_eps": -1.0},
    "dtype": {"dtype": "float7"},
    "sliding": {"model_type": "mistral", "sliding_window": "abc"},
    "window": {"model_type": "mistral", "sliding_window": -4},
    "dropout": {"attention_dropout": 2.0},
    "cap": {"model_type": "gemma2", "final_logit_softcapping": 0.0},
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_config_of_no_model_is_one_error_that_names_it(broken: str, published: Any, tmp_path: Path) -> None:
    config, changes = json.loads((Path(published("llama")[1]) / "config.json").read_text()), BROKEN[broken]
    (tmp_path / "config.json").write_text(changes if isinstance(changes, str) else json.dumps(config | changes))
    with pytest.raises(ConfigError, match=rf"^model\.name={tmp_path}: ") as error, torch.device("meta"):
        HuggingFace(name=str(tmp_path), pretrained=None, max_seq_len=64, vocab_size=64)
    assert error.value.fix.startswith("model.name=<")
    assert not re.search("StrictDataclass|module 'torch'", error.value.reason)


def test_an_attention_kernel_in_a_config_is_not_needed(published: Any, tmp_path: Path) -> None:
    config = json.loads((Path(published("llama")[1]) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attn_implementation": "flash_attention_2"}))
    with torch.device("meta"):
        HuggingFace(name=str(tmp_path), pretrained=None, max_seq_len=64, vocab_size=64)


def test_weights_of_another_model_are_rejected(published: Any) -> None:
    folder = published("gpt2")[1]
    with pytest.raises(ConfigError, match=f"of type gpt2, and model.name is one of llama; type model.name={folder}$"):
        model_of(published("llama")[1], pretrained=folder)


def test_weights_of_another_size_are_rejected(published: Any, tmp_path: Path) -> None:
    config = json.loads((Path(published("qwen2")[1]) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    (tmp_path / "model.safetensors").symlink_to(Path(published("qwen2")[1], "model.safetensors"))
    with pytest.raises(ConfigError, match="has the shape .* describes .*; type model.name=<folder whose config.json"):
        model_of(str(tmp_path), pretrained=str(tmp_path))


_THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
OTHER_SETTINGS: dict[str, tuple[dict[str, Any], str | None]] = {
    "theta": (_THETA, r"rope_theta=500000.0, not 10000.0; type model.name=\S*, or model.name=<a copy of"),
    "activation": ({"hidden_act": "gelu"}, r'hidden_act="gelu", not "silu"; type model.name=\S*$'),
    "epsilon": ({"rms_norm_eps": 1e-3}, "rms_norm_eps=0.001, not 1e-06"),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_parameters.factor=2.0, not null"),
    "untied": ({"tie_word_embeddings": False}, "tie_word_embeddings=false, not true"),
    "vocabulary": ({"vocab_size": 65}, "vocab_size=65, not 64"),
    "quantized": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"are quantized \(gptq\)"),
    "unknown": ({"model_type": "llamma"}, "knows no models of type llamma; type model.pretrained=<a model of another"),
    "vision": ({"model_type": "resnet"}, "of type resnet, .* type model.pretrained=<weights of a llama>$"),
    "notes": ({"unsloth_version": "2024.8", "attention_dropout": 0.5, "use_cache": False, "pretraining_tp": 2}, None),
    "context": ({"max_position_embeddings": 4096}, None),
    "written as": ({"rope_theta": 10000, "rope_scaling": None}, None),
}


@pytest.mark.parametrize("kind", OTHER_SETTINGS)
def test_weights_of_other_settings_are_refused_and_notes_are_not(kind: str, published: Any, tmp_path: Path) -> None:
    """Tensors of the same names and shapes compute something else with another rope_theta or activation."""
    settings, message = OTHER_SETTINGS[kind]
    folder = Path(published("llama")[1])
    config = json.loads((folder / "config.json").read_text())
    if "rope_scaling" in settings:
        del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | settings))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        model_of(str(folder), pretrained=str(tmp_path))
