"""A GGUF file becomes a folder with the weights that it stands for, and a model that is trained."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support import execute

from recipes.config import compose_and_check
from recipes.errors import ConfigError
from recipes.mode import convert_gguf
from recipes.tokenizer import read_folder

HEADS, WIDTH, INNER, LAYERS = 4, 64, 96, 2
TOKENS = ["<unk>", "<s>", "</s>", *(chr(code) for code in range(33, 127)), "ab"]


def make_model(rope: dict[str, Any] | None = None) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        rope_parameters=rope,
    )
    return LlamaForCausalLM(config)


def interleave(weight: NDArray[Any]) -> NDArray[Any]:
    """Return the rows of a projection as llama.cpp orders them: the two halves of each head take turns."""
    rows, columns = weight.shape
    return weight.reshape(HEADS, 2, rows // HEADS // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(
    path: Path,
    model: Any,
    *,
    architecture: str = "llama",
    quantized: bool = False,
    without: str = "nothing",
    more: dict[str, NDArray[Any]] | None = None,
    settings: dict[str, Any] | None = None,
    lacks: str = "nothing",
    heads: int = HEADS,
) -> None:
    """Write a model as llama.cpp's converter does.

    Args:
        path: File to write.
        model: Its weights.
        architecture: What the file calls it.
        quantized: Whether matrices are in Q8_0.
        without: Pattern of tensors of the file to leave out.
        more: Further tensors.
        settings: Further settings, texts and whole numbers.
        lacks: End of the name of a setting to leave out.
        heads: Number of heads that the file names.
    """
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(heads)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(float(model.config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["a b"])
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            values = interleave(values)
        found = names.get_name(name, try_suffixes=(".weight",))
        if re.match(without, found):
            continue
        if quantized and values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(found, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(found, values)
    for name, values in (more or {}).items():
        writer.add_tensor(name, values)
    for name, value in (settings or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint16)(name, value)
    writer.kv_data[0] = {key: value for key, value in writer.kv_data[0].items() if not key.endswith(lacks)}
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def converted(folder: Path, *overrides: str) -> Any:
    from transformers import AutoModelForCausalLM

    typed = [f"mode.path={folder / 'model.gguf'}", f"mode.output={folder / 'out'}", *overrides]
    assert execute("mode=convert_gguf", *typed) == 0
    return AutoModelForCausalLM.from_pretrained(folder / "out", dtype="auto")


def test_weights_and_tokens_are_those_of_the_model_that_the_file_was_made_from(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = make_model()
    write_gguf(tmp_path / "model.gguf", model)
    found = converted(tmp_path).state_dict()
    assert "de-quantizing" not in capfd.readouterr().err  # the other bars are of this test's own reading
    tokenizer = read_folder(tmp_path / "out")
    assert tokenizer.vocab_size == len(TOKENS), "transformers adds <|endoftext|>, for which there is no embedding"
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
    # the umask decides, and not safetensors: a server may run under another user
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    (tmp_path / "plain").touch()
    assert modes == {(tmp_path / "plain").stat().st_mode & 0o777}


def test_quantized_weights_become_what_they_stand_for(tmp_path: Path) -> None:
    import gguf

    model = make_model()
    write_gguf(tmp_path / "model.gguf", model, quantized=True)
    found = converted(tmp_path, "mode.dtype=bfloat16").state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    kind = gguf.GGMLQuantizationType.Q8_0
    stands_for = gguf.quants.dequantize(gguf.quants.quantize(model.state_dict()[name].numpy(), kind), kind)
    assert found[name].dtype == torch.bfloat16
    assert torch.equal(found[name], torch.from_numpy(np.ascontiguousarray(stands_for)).bfloat16())


def test_the_folder_is_trained(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_model())
    converted(tmp_path)
    tiny = [
        "model=huggingface",
        f"model.name={tmp_path / 'out'}",
        "data=random_tokens",
        "model.max_seq_len=16",
        "callbacks=[]",
    ]
    tiny += ["trainer.max_steps=2", "global_batch_size=2", "eval_samples=2", "save_every=null"]
    assert execute(*tiny, f"hydra.run.dir={tmp_path / 'run'}") == 0


# what is not all of a model, or more than transformers reads of one -> the clause that names it
PARTIAL: dict[str, tuple[dict[str, Any], str]] = {
    "vocabulary": ({"without": ""}, "it holds a vocabulary and no weights"),
    "part": (
        {"without": "blk.1|output", "settings": {"split.count": 2}},
        "one of the 2 parts.*llama-gguf-split --merge",
    ),
    "block": ({"without": "blk.1"}, "its files do not have model.layers.1.input_layernorm.weight and 8 more"),
    "shape": (
        {"without": "blk.1.ffn_up", "more": {"blk.1.ffn_up.weight": np.ones((WIDTH, INNER), np.float32)}},
        r"its model.layers.1.mlp.up_proj.weight has the shape \(64, 96\), and its settings describe \(96, 64\); type",
    ),
    "rows": (
        {"without": "token_embd", "more": {"token_embd.weight": np.ones((90, WIDTH), np.float32)}},
        "its tokenizer has 98 tokens, and its token_embd.weight 90 rows",
    ),
    "no tokenizer": ({"lacks": "ggml.tokens"}, r"it has no tokenizer \(tokenizer.ggml.tokens\)"),
    "no merges": ({"lacks": "ggml.merges"}, r"neither merges nor scores \(tokenizer.ggml.merges, tokenizer.ggml.sc"),
    "projector": ({"architecture": "clip", "lacks": "ggml.tokens"}, "it is the projector of a multimodal model"),
    "adapter": ({"settings": {"general.type": "adapter"}}, "it is a file of the kind adapter, not a model"),
    "no heads": ({"heads": 0}, "head_count=0, which no model can"),
    "three heads": ({"heads": 3}, "attention.head_count_kv=4, which does not divide its 3 heads"),
    "norm": ({"without": "output_norm"}, "its files do not have model.norm.weight"),
    "biases": ({"more": {"blk.0.attn_q.bias": np.ones(WIDTH, np.float32)}}, "no place for blk.0.attn_q.bias"),
    "further block": ({"more": {"blk.2.attn_norm.weight": np.ones(WIDTH, np.float32)}}, "no place for blk.2.attn_norm"),
    "factors": ({"more": {"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}}, "rope_freqs.weight in another way"),
    "yarn": ({"settings": {"llama.rope.scaling.type": "yarn"}}, r"scales rotary frequencies \(yarn\)"),
    "window": (
        {"settings": {"llama.attention.sliding_window": 16}},
        "attention.sliding_window=16 has no place in a llama",
    ),
}


@pytest.mark.parametrize("kind", PARTIAL)
def test_a_file_that_is_not_read_as_a_whole_is_refused(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options, reason = PARTIAL[kind]
    write_gguf(tmp_path / "model.gguf", make_model(), **options)
    with pytest.raises(ConfigError, match=rf"^mode\.path={tmp_path}/model\.gguf: .*{reason}"):
        convert_gguf._load(tmp_path / "model.gguf", torch.float32)
    assert "LOAD REPORT" not in capfd.readouterr().err


def test_the_rotary_scaling_of_llama_3_1_is_read_and_nothing_beside_the_file(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = make_model(rope | {"original_max_position_embeddings": 8192})
    plain = 5e5 ** -(np.arange(0, 16, 2) / 16)  # [Q / 2]
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.max() == pytest.approx(8)
    write_gguf(tmp_path / "model.gguf", model, more={"rope_freqs.weight": factors})
    code = {"model_type": "llama", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(code))
    tokens = torch.arange(3, 93)[None]
    assert torch.equal(converted(tmp_path)(tokens).logits, model(tokens).logits)
    assert "auto_map" not in (tmp_path / "out/config.json").read_text()


def mistake(folder: Path, **settings: str) -> str:
    from recipes.build import execute as execute_mode

    typed = {"path": str(folder / "model.gguf"), "output": str(folder / "out")} | settings
    composed, mistakes = compose_and_check(
        ["mode=convert_gguf", *(f"mode.{key}={value}" for key, value in typed.items())]
    )
    assert not mistakes
    assert composed is not None
    with pytest.raises(ConfigError) as error:
        execute_mode(composed)
    return str(error.value)


def test_other_files_and_folders_are_left_as_they_are(tmp_path: Path) -> None:
    for path in (str(tmp_path / "model.gguf"), "x" * 300, "~nobody/x"):
        assert "there is no such file" in mistake(tmp_path, path=path)
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04")
    assert "it is not a GGUF file" in mistake(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "is a Git LFS pointer" in mistake(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + (99).to_bytes(4, "little"))
    assert "it is of version 99 of GGUF, and versions 2 and 3 are read" in mistake(tmp_path)
    assert f"it is a folder, not a file; type mode.path={tmp_path}/model.gguf" in mistake(tmp_path, path=str(tmp_path))
    write_gguf(tmp_path / "model.gguf", make_model(), architecture="unheard_of")
    assert "cannot be read: ValueError: GGUF model with architecture unheard_of is not supported" in mistake(tmp_path)
    assert not list(tmp_path.glob("*out*"))
    (tmp_path / "out").mkdir()
    assert "it already exists" in mistake(tmp_path)


@pytest.mark.parametrize("lacks", ["context_length", "layer_norm_rms_epsilon", "attention.head_count"])
def test_a_setting_that_would_be_guessed_is_missed(lacks: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_model(), lacks=lacks)
    with pytest.raises(ConfigError, match=rf"it lacks the setting llama\.\S*{lacks}, which would be guessed"):
        convert_gguf._load(tmp_path / "model.gguf", torch.float32)


def test_a_folder_is_answered_with_the_file_in_it_or_as_the_model_that_it_is(tmp_path: Path) -> None:
    def answer() -> str:
        with pytest.raises(ConfigError, match="it is a folder, not a file") as raised:
            convert_gguf.convert_gguf(None, path=str(tmp_path), output=str(tmp_path / "new"), dtype="float32")  # type: ignore[arg-type]
        return raised.value.fix

    assert answer() == "mode.path=<a .gguf file>"
    (tmp_path / "config.json").touch()
    assert answer() == f"model=huggingface model.name={tmp_path} instead of mode=convert_gguf, as it is read without"
    (tmp_path / "model.gguf").touch()
    assert answer() == f"mode.path={tmp_path / 'model.gguf'}"


def test_a_file_that_was_cut_off_is_said_to_be(tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", make_model())
    whole, file = (tmp_path / "whole.gguf").read_bytes(), tmp_path / "model.gguf"
    for content in (whole[:-500], whole[:300], whole[:8] + (2**62).to_bytes(8, "little") + whole[16:]):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="its download was cut off.*; type mode.path=<a complete copy of it>"):
            convert_gguf._load(file, torch.float32)


def test_nan_in_a_file_is_named(tmp_path: Path) -> None:
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight[3, 3] = torch.nan
    write_gguf(tmp_path / "model.gguf", model)
    with pytest.raises(ConfigError, match=r"it holds NaN or inf in lm_head\.weight"):
        convert_gguf._load(tmp_path / "model.gguf", torch.float32)
