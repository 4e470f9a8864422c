"""An export has the dtype of the weights that a fine-tuning started from, rounded once, or the one that is typed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from exported_models import Kind, Text, make_model, publish_text, scramble
from safetensors.torch import load_file
from support import execute, write_texts
from torch import nn

from recipes.adapter import is_adapter
from recipes.errors import ConfigError
from recipes.model.weights.adapter import merge_adapter
from recipes.model.weights.dtypes import convert_parameters, find_dtype

PLAIN = Text(is_like_sentencepiece=False, has_start=False, has_several_ends=False, has_template=False)
STEPS = [
    *("trainer.max_steps=2", "eval_every=2", "trainer.accelerator=cpu", "callbacks=[]", "global_batch_size=4"),
    *("eval_samples=4", "data=text_files", "optimizer.lr=1e-3", "warmup_steps=1"),
]
BITS = {"bfloat16": 8, "float16": 11}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a short fine-tuning, with an adapter, of a published model in bfloat16."""
    folder = tmp_path_factory.mktemp("tuned")
    texts, base = write_texts(folder / "texts"), folder / "base"
    vocab_size = publish_text(PLAIN, base).get_vocab_size()
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = hf.LlamaConfig(**shape, num_key_value_heads=2, max_position_embeddings=96, vocab_size=vocab_size)
    model = hf.AutoModelForCausalLM.from_config(config)
    scramble(model)
    model.to(torch.bfloat16).save_pretrained(base)
    typed = [f"data.path={texts}", "model=huggingface", f"model.name={base}", "model.max_seq_len=32", "adapter=lora"]
    assert execute(*typed, *STEPS, f"hydra.run.dir={folder / 'run'}") == 0
    return folder / "run"


def export(run: Path, folder: Path, *overrides: str) -> dict[str, torch.Tensor]:
    assert execute(f"resume={run}", "mode=export", f"mode.path={folder}", *overrides) == 0
    return load_file(folder / "model.safetensors")


def test_a_fine_tuning_is_exported_in_the_dtype_of_its_base_and_rounded_once(run: Path, tmp_path: Path) -> None:
    full = export(run, tmp_path / "full", "mode.dtype=float32")
    base = load_file(run.parent / "base/model.safetensors")
    default = export(run, tmp_path / "default")
    assert {tensor.dtype for tensor in default.values()} == {torch.bfloat16}
    assert all(torch.equal(default[name], tensor.bfloat16()) for name, tensor in full.items())
    # the sums that were rounded are not those of rounded terms
    changed = [name for name, tensor in full.items() if not torch.equal(tensor, base[name].float())]
    assert any("q_proj" in name for name in changed)
    assert any(not torch.equal(full[name], full[name].bfloat16().float()) for name in changed)
    config = json.loads((tmp_path / "default/config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"


@pytest.mark.parametrize("dtype", BITS)
def test_transformers_loads_the_dtype_and_computes_the_logits_of_the_rounded_weights(
    dtype: str, run: Path, tmp_path: Path
) -> None:
    full, rounded = tmp_path / "full", tmp_path / "rounded"
    export(run, full, "mode.dtype=float32")
    export(run, rounded, f"mode.dtype={dtype}")
    load = hf.AutoModelForCausalLM.from_pretrained
    assert load(rounded).dtype == getattr(torch, dtype)
    ours, theirs = load(full).eval(), load(rounded, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in ours.parameters():  # by hand: what that dtype holds of each weight
            parameter.copy_(parameter.to(getattr(torch, dtype)).float())
        tokens = torch.arange(24).reshape(2, 12)
        assert torch.equal(theirs(tokens).logits, ours(tokens).logits)
        exact = load(full).eval()(tokens).logits
    error = (theirs(tokens).logits - exact).abs().max() / exact.abs().max()
    assert 0 < error < 8 * 2.0 ** -BITS[dtype]  # a few roundings of half a unit in the last place


@pytest.mark.parametrize("family", ["llama", "tied llama", "deepseek"])
def test_a_tied_weight_is_converted_once_and_buffers_stay(family: str, tmp_path: Path) -> None:
    model = make_model(Kind(family), publish_text(PLAIN, tmp_path), tmp_path)
    buffers = {name: buffer.dtype for name, buffer in model.named_buffers()}
    tied = model.head.weight is model.embedding.weight
    convert_parameters(model, torch.bfloat16, setting="mode.dtype=bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {name: buffer.dtype for name, buffer in model.named_buffers()} == buffers
    assert (model.head.weight is model.embedding.weight) == tied == (family == "tied llama")


def test_a_value_beyond_the_dtype_is_an_error_and_one_within_it_is_not() -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[65504.0, -65519.0], [0.0, 1.0]]))  # 65519 rounds to the largest number
    convert_parameters(model, torch.float16, setting="mode.dtype=float16")
    assert model.weight.abs().max().item() == 65504.0
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[0, 0] = -70000.0
    with pytest.raises(ConfigError) as caught:
        convert_parameters(model, torch.float16, setting="mode.dtype=float16")
    assert str(caught.value) == (
        "mode.dtype=float16: weight holds 70000, and the largest number of float16 is 65504; type mode.dtype=bfloat16"
    )
    convert_parameters(model, torch.bfloat16, setting="mode.dtype=bfloat16")
    assert model.weight[0, 0].item() == -70144.0  # 8 bits


def test_the_dtype_of_published_weights_is_that_of_most_of_their_values(tmp_path: Path) -> None:
    model = make_model(Kind("any llama"), publish_text(PLAIN, tmp_path), tmp_path).inner
    assert find_dtype(str(tmp_path)) == torch.float32
    model.half()
    model.model.norm.float()
    model.save_pretrained(tmp_path)
    assert find_dtype(str(tmp_path)) == torch.float16
    torch.save({"weight": torch.zeros(3, dtype=torch.bfloat16), "steps": torch.zeros(9).long()}, tmp_path / "net.pth")
    assert find_dtype(str(tmp_path / "net.pth")) == torch.bfloat16


def test_weights_that_are_gone_are_said_to_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="lightning_recipes")
    assert find_dtype(str(tmp_path / "gone")) is None
    assert caplog.text.count("is gone: the export has the dtype of the run") == 1


def test_an_adapter_alone_is_converted_and_its_base_is_not(tmp_path: Path) -> None:
    model: Any = make_model(Kind("any llama", "lora"), publish_text(PLAIN, tmp_path), tmp_path)
    convert_parameters(model, torch.bfloat16, setting="mode.dtype=bfloat16", only=is_adapter)
    dtypes = {is_adapter(name): parameter.dtype for name, parameter in model.named_parameters()}
    assert dtypes == {True: torch.bfloat16, False: torch.float32}
    convert_parameters(model, torch.float32, setting="mode.dtype=float32")
    merge_adapter(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
