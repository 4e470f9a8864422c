"""Any model of transformers: its logits, its first weights, packed documents, generation, and files in and out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from recipes.errors import ConfigError
from recipes.model.generate import generate, generate_batch
from recipes.model.huggingface import HuggingFace
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
LENGTHS = [[10, 14], [3, 21]]  # of the documents of two rows
PROMPTS = [[5, 6, 7], [9], [3] * 12]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a model of transformers by its kind, and the folder that it was saved in."""
    made: dict[str, tuple[Any, str]] = {}

    def make(kind: str) -> tuple[Any, str]:
        if kind not in made:
            torch.manual_seed(0)
            model = hf.AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()
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


@pytest.mark.parametrize("kind", CONFIGS)
def test_text_is_the_same_with_and_without_a_cache_alone_and_in_a_batch(kind: str, published: Any) -> None:
    _, folder = published(kind)
    model = model_of(folder, pretrained=folder)
    greedy: dict[str, Any] = {"temperature": 0.0, "top_k": None, "top_p": None}
    alone = [generate(model, prompt, 8, **greedy, seed=0) for prompt in PROMPTS]  # type: ignore[arg-type]
    assert alone == [
        generate(model, prompt, 8, **greedy, seed=0, use_cache=False)  # type: ignore[arg-type]
        for prompt in PROMPTS
    ]
    together = generate_batch(model, PROMPTS, 8, **greedy, seeds=range(3), ends=[])  # type: ignore[arg-type]
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
        ({"name": "/nonexistent"}, "model.name=/nonexistent: transformers says: "),
    ],
)
def test_what_does_not_fit_is_named(settings: dict[str, Any], message: str, published: Any) -> None:
    arguments = {"name": published("llama")[1], "pretrained": None, "max_seq_len": 64, "vocab_size": 64} | settings
    with pytest.raises(ConfigError, match=message):
        HuggingFace(**arguments)


def test_weights_of_another_model_are_rejected(published: Any) -> None:
    with pytest.raises(ConfigError, match=r"it has no model\.norm\.weight|it has no lm_head|it has no model"):
        model_of(published("llama")[1], pretrained=published("gpt2")[1])


def test_weights_of_another_size_are_rejected(published: Any, tmp_path: Path) -> None:
    config = json.loads((Path(published("qwen2")[1]) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(ConfigError, match="has the shape .* not "):
        model_of(str(tmp_path), pretrained=published("qwen2")[1])
