"""An export generates what the run generates, stops where it stops, and is read back whole, for every kind of model."""

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from exported_models import ADAPTERS, OWN, PUBLISHED, Kind, Text, make_model, publish_text
from one_text import generate
from tokenizers import pre_tokenizers

from recipes.adapter.nf4_base import dequantize_base
from recipes.data.conversations.chat_template import find_stop_ids, prompt_for_answer
from recipes.errors import ConfigError
from recipes.files import filling
from recipes.model.gpt2 import GPT2
from recipes.model.huggingface import HuggingFace
from recipes.model.weights import text_side
from recipes.model.weights.adapter import merge_adapter
from recipes.model.weights.huggingface import export_pretrained
from recipes.model.weights.peft_folder import save_adapter
from recipes.model.weights.text_side import EXPORT_FILES, load_exported_tokenizer, write_text_side
from recipes.numerics.nf4 import dequantize, list_nf4
from recipes.tokenizer import Tokenizer, read_folder
from recipes.tokenizer.bytes import byte_tokenizer

GREEDY: dict[str, Any] = {"temperature": 0.0, "top_k": None, "top_p": None, "seed": 0}
NUM_TOKENS = 12
PROMPT = "the  loss"
HARD = "Grüße, 世界! 1234 5\n\n\tdef f(x):  return x**2 <|im_end|> don't </s>the\u00a0end "
KINDS = [
    *(Kind(family) for family in (*OWN, *PUBLISHED)),
    *(
        Kind(family, adapter, is_separate)
        for family, adapter, is_separate in itertools.product(PUBLISHED, ADAPTERS, (False, True))
    ),
]
TEXTS = [Text(*flags) for flags in itertools.product((False, True), repeat=4)]
# every model with both values of each property of a tokenizer: a tokenizer and the one that differs in all of them
QUICK_CASES = [
    (Kind(family), text)
    for index, family in enumerate((*OWN, *PUBLISHED))
    for text in (TEXTS[index], TEXTS[15 - index])
]
QUICK_CASES += [
    (Kind("any llama"), Text(False, True, True, True, has_start_first=True)),
    (Kind("any llama", "lora", True), TEXTS[7]),
    (Kind("any qwen2", "dora"), TEXTS[12]),
    (Kind("any qwen2", "ia3", True), TEXTS[9]),
    (Kind("any qwen2", "qlora"), TEXTS[3]),
    (Kind("any llama", "qlora", True), TEXTS[14]),
]
ALL_CASES = [case for case in itertools.product(KINDS, TEXTS) if case not in QUICK_CASES]


@pytest.mark.parametrize(("kind", "text"), QUICK_CASES, ids=lambda part: str(part))
def test_an_export_is_what_was_trained(kind: Kind, text: Text, tmp_path: Path) -> None:
    check(kind, text, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "text"), ALL_CASES, ids=lambda part: str(part))
def test_an_export_of_any_kind_is_what_was_trained(kind: Kind, text: Text, tmp_path: Path) -> None:
    check(kind, text, tmp_path)


def check(kind: Kind, text: Text, tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "export"
    model = make_model(kind, publish_text(text, source), source)
    tokenizer = read_folder(source)
    tokenizer.save(tmp_path / "tokenizer")  # as a run keeps it
    tokenizer = load_exported_tokenizer(tmp_path / "tokenizer", None)
    prompts = [tokenizer.encode_start(PROMPT)]
    if text.has_template:
        prompts.append(prompt_for_answer(PROMPT, tokenizer)[0])
    bring_an_end(model, prompts[-1], tokenizer)
    ends = find_stop_ids(tokenizer)
    own = [generate(model, prompt, NUM_TOKENS, **GREEDY, ends=ends) for prompt in prompts]

    quantized = {name: dequantize(weight) for name, weight in list_nf4(model)}
    if kind.is_separate:
        save_adapter(model, folder)
        write_text_side(folder, tokenizer=tokenizer, published=str(source))
        base = hf.AutoModelForCausalLM.from_pretrained(source)
        theirs = peft.PeftModel.from_pretrained(base, str(folder))
        with torch.no_grad():
            base.get_output_embeddings().weight.copy_(model.inner.get_output_embeddings().weight)
            for name, values in quantized.items():
                theirs.get_parameter(f"base_model.model.{name.removeprefix('inner.')}").copy_(values)
    else:
        if kind.adapter is not None:
            dequantize_base(model)
            merge_adapter(model)
        export_pretrained(model, folder, tokenizer_folder=tmp_path / "tokenizer", published=str(source))
        theirs = hf.AutoModelForCausalLM.from_pretrained(folder)
    loaded, generation = hf.AutoTokenizer.from_pretrained(folder), hf.GenerationConfig.from_pretrained(folder)

    check_text(tokenizer, loaded, prompts, text)
    num_stopped = 0
    for prompt, tokens in zip(prompts, own, strict=True):
        found = theirs.generate(
            torch.tensor([prompt]), generation_config=generation, max_new_tokens=NUM_TOKENS, do_sample=False
        )[0].tolist()
        new = found[len(prompt) :]
        num_stopped += new[-1] in ends
        assert (new[:-1] if new[-1] in ends else new) == tokens
        before, whole = tokenizer.decode(prompt), loaded.decode([*prompt, *tokens])
        continuation = tokenizer.decode_continuation(prompt, tokens)
        # bytes that are no UTF-8 also make the newline before them, a byte of its own, unreadable
        assert whole == before + continuation or ("\ufffd" in continuation and whole.endswith(continuation))
    assert num_stopped >= 1
    configs = [generation] if kind.is_separate else [generation, hf.AutoConfig.from_pretrained(folder)]
    for config in configs:
        assert config.eos_token_id == (ends[0] if len(ends) == 1 else list(ends))
        assert config.bos_token_id == tokenizer.find_id("bos")
        assert config.pad_token_id == (0 if text.has_start else None)
    assert generation.max_new_tokens == 7, "what the publisher set stays"
    assert (folder / "LICENSE").is_file() == text.has_several_ends


@torch.no_grad()
def bring_an_end(model: Any, prompt: list[int], tokenizer: Tokenizer) -> None:
    """Swap the rows of an end and of a token in the head, until a text ends early: random weights never end one."""
    inner = getattr(model, "inner", None)
    weight = (
        inner.get_output_embeddings().weight if inner is not None else getattr(model, "head", model.embedding).weight
    )
    end = find_stop_ids(tokenizer)[-1]
    for place in range(3, NUM_TOKENS):
        tokens = generate(model, prompt, NUM_TOKENS, **GREEDY)
        if end in tokens:
            return
        weight[[tokens[place], end]] = weight[[end, tokens[place]]]
    assert end in generate(model, prompt, NUM_TOKENS, **GREEDY)


def check_text(tokenizer: Tokenizer, loaded: Any, prompts: list[list[int]], text: Text) -> None:
    assert loaded(PROMPT)["input_ids"] == prompts[0]
    assert loaded(HARD)["input_ids"] == tokenizer.encode_start(HARD, reads_special_tokens=True)
    assert loaded(HARD, add_special_tokens=False)["input_ids"] == tokenizer.encode_rendered(HARD).ids
    assert "token_type_ids" not in loaded(HARD)
    assert prompts[0].count(loaded.convert_tokens_to_ids("<s>")) == text.has_start
    assert (loaded.chat_template is not None) == text.has_template
    if text.has_template:
        chat = [{"role": "user", "content": PROMPT}]
        assert loaded.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] == prompts[1]


def own_export(tmp_path: Path, text: Text, **files: Any) -> tuple[Tokenizer, Path]:
    """Export a random Llama with a tokenizer as its publisher has changed it; return the tokenizer and the export."""
    source, folder = tmp_path / "source", tmp_path / "export"
    model = make_model(Kind("llama"), publish_text(text, source), source)
    for name, content in files.items():
        (source / f"{name}.json").write_text(json.dumps(content))
    tokenizer = read_folder(source)
    tokenizer.save(tmp_path / "tokenizer")
    export_pretrained(model, folder, tokenizer_folder=tmp_path / "tokenizer", published=str(source))
    return tokenizer, folder


PLAIN = Text(is_like_sentencepiece=False, has_start=False, has_several_ends=False, has_template=False)


def test_every_end_in_either_config_of_the_source_is_kept_and_other_ids_are_not_made_up(tmp_path: Path) -> None:
    tokenizer, folder = own_export(
        tmp_path, PLAIN, generation_config={"eos_token_id": [7, 50]}, config={"eos_token_id": 9, "bos_token_id": None}
    )
    for name in ("config.json", "generation_config.json"):
        written = json.loads((folder / name).read_text())
        assert written["eos_token_id"] == [7, 50, 9, tokenizer.end_of_text]
        assert (written["bos_token_id"], written["pad_token_id"]) == (None, None)


def test_settings_of_generation_that_change_the_text_are_kept_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="lightning_recipes")
    settings = {"do_sample": False, "temperature": 0.9, "repetition_penalty": 1.1, "max_length": 20, "use_cache": True}
    settings |= {"stop_strings": ["loss"], "epsilon_cutoff": 0.1, "sequence_bias": [[[5], 1.0]]}
    _, folder = own_export(tmp_path, PLAIN, generation_config=settings)
    written = json.loads((folder / "generation_config.json").read_text())
    assert settings.items() <= written.items()
    shown = "do_sample=false, temperature=0.9, repetition_penalty=1.1, max_length=20"
    shown += ', stop_strings=["loss"], epsilon_cutoff=0.1, sequence_bias=[[[5], 1.0]]'
    assert f"keeps {shown} of the published model" in caplog.text


def test_settings_of_generation_that_transformers_refuses_are_left_out_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer, folder = own_export(tmp_path, PLAIN, generation_config={"max_new_tokens": -1, "top_k": 3})
    written = json.loads((folder / "generation_config.json").read_text())
    assert written == {"bos_token_id": None, "eos_token_id": tokenizer.end_of_text, "pad_token_id": None}
    assert "transformers refuses the settings of generation of the published model" in caplog.text


def test_files_that_nothing_here_writes_are_copied_and_weights_and_other_templates_are_not(tmp_path: Path) -> None:
    others = {"special_tokens_map": {"eos_token": "</s>"}, "preprocessor_config": {}, "added_tokens": {}}
    skipped: dict[str, Any] = {"model.safetensors.index": {}, "trainer_state": {}, "chat_template": {}}
    _, folder = own_export(tmp_path, PLAIN, **others, **skipped)
    assert {f"{name}.json" for name in others} <= {path.name for path in folder.iterdir()}
    assert not {f"{name}.json" for name in skipped} & {path.name for path in folder.iterdir()}


def test_of_a_source_with_other_tokens_there_is_only_the_architecture(tmp_path: Path) -> None:
    source = tmp_path / "source"
    make_model(Kind("any qwen2"), publish_text(Text(True, True, True, True), source), source)
    tokenizer = byte_tokenizer()
    tokenizer.save(tmp_path / "tokenizer")
    with torch.device("meta"):
        vocab_size = json.loads((source / "config.json").read_text())["vocab_size"]
        model = HuggingFace(name=str(source), pretrained=None, max_seq_len=16, vocab_size=vocab_size)
    model.to_empty(device="cpu")
    model.init_weights(0)
    export_pretrained(model, tmp_path / "export", tokenizer_folder=tmp_path / "tokenizer")
    loaded = hf.AutoTokenizer.from_pretrained(tmp_path / "export")
    assert loaded("a  1234")["input_ids"] == [*b"a  1234"]
    generation = hf.GenerationConfig.from_pretrained(tmp_path / "export")
    assert (generation.eos_token_id, generation.bos_token_id, generation.max_new_tokens) == (256, None, None)
    assert not (tmp_path / "export/LICENSE").exists()


def test_a_run_on_prepared_tokens_is_exported_with_the_tokenizer_of_the_published_model(tmp_path: Path) -> None:
    source = tmp_path / "source"
    model = make_model(Kind("any llama"), publish_text(Text(True, True, True, True), source), source)
    export_pretrained(model, tmp_path / "export")
    loaded = hf.AutoTokenizer.from_pretrained(tmp_path / "export")
    assert loaded(HARD)["input_ids"] == read_folder(source).encode_start(HARD, reads_special_tokens=True)
    assert hf.GenerationConfig.from_pretrained(tmp_path / "export").eos_token_id == [2, 3]


def test_a_tokenizer_that_transformers_does_not_load_as_it_was_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = hf.AutoTokenizer.from_pretrained

    def load(*args: Any, **options: Any) -> Any:
        theirs = loaded(*args, **options)
        theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        return theirs

    monkeypatch.setattr(hf.AutoTokenizer, "from_pretrained", load)
    monkeypatch.setattr("recipes.model.weights.huggingface._write_weights", None)  # the check comes before them
    with pytest.raises(ConfigError, match=r"tokenizes differently: \d+ ids instead of \d+; type pip install"):
        own_export(tmp_path, PLAIN)


def test_code_of_the_publisher_is_named_nowhere_in_an_export(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lightning_recipes")
    source, folder = tmp_path / "source", tmp_path / "export"
    model = make_model(Kind("any llama"), publish_text(PLAIN, source), source)
    model.inner.config.auto_map = {"AutoConfig": "their.Config", "AutoTokenizer": [None, "their.Tokenizer"]}
    model.inner.config.custom_pipelines = {"chat": {"impl": "their.Chat"}}
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": [None, "their.Tokenizer"]}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    (source / "processor_config.json").write_text(json.dumps({"auto_map": {"AutoProcessor": "their.Processor"}}))
    read_folder(source).save(tmp_path / "tokenizer")
    export_pretrained(model, folder, tokenizer_folder=tmp_path / "tokenizer", published=str(source))
    for name in ("config", "tokenizer_config", "processor_config", "generation_config"):
        text = (folder / f"{name}.json").read_text()
        assert "their." not in text
        assert "auto_map" not in text
    assert "The tokenizer is exported" not in caplog.text, "its class is fine"


def test_an_export_has_no_weights_of_an_earlier_one_of_another_kind(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "export"
    model = make_model(Kind("any llama", "lora"), publish_text(PLAIN, source), source)
    merged = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    separate = ["adapter_config.json", "adapter_model.safetensors", *merged[1:2], *merged[3:]]
    folder.mkdir()
    older = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "model_mine.bin")
    for name in older:
        (folder / name).touch()
    for kept in (separate, merged):
        if kept is merged:
            merge_adapter(model)
            export_pretrained(model, folder, published=str(source))
        else:
            with filling(folder, owned=EXPORT_FILES) as unfinished:
                save_adapter(model, unfinished)
                write_text_side(unfinished, tokenizer=None, published=str(source))
        assert sorted(path.name for path in folder.iterdir()) == sorted([*kept, "model_mine.bin"])


def test_a_damaged_tokenizer_of_the_published_model_is_that_of_another_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    byte_tokenizer().save(tmp_path / "tokenizer")
    (tmp_path / "tokenizer.json").write_text('{"version": "2.0"}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert load_exported_tokenizer(tmp_path / "tokenizer", str(tmp_path)).end_ids == [256]
    assert caplog.text.count("tokenizer.json cannot be read") == 1


def test_transformers_still_replaces_the_rules_of_a_qwen2_whatever_class_its_files_name(tmp_path: Path) -> None:
    """transformers#45920, in 5.24: when this fails, `_WITH_CODE` can go."""
    make_model(Kind("any qwen2"), publish_text(PLAIN, tmp_path), tmp_path)
    assert read_folder(tmp_path).encode("e\u0301") != hf.AutoTokenizer.from_pretrained(tmp_path)("e\u0301")["input_ids"]


def test_no_config_that_transformers_reads_leaves_it_the_ids_of_the_model_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2's own lie outside of a small vocabulary, and each reading of such a config would warn twice."""
    model = GPT2(vocab_size=257, max_seq_len=8, num_layers=1, num_heads=1, hidden_size=8, dropout=0.0)
    byte_tokenizer().save(tmp_path / "tokenizer")
    load, read = hf.AutoTokenizer.from_pretrained, []

    def record(folder: str, **options: Any) -> Any:
        read.append(json.loads((Path(folder) / "config.json").read_text()))
        return load(folder, **options)

    monkeypatch.setattr(hf.AutoTokenizer, "from_pretrained", record)
    export_pretrained(model, tmp_path / "export", tokenizer_folder=tmp_path / "tokenizer")
    assert [config["eos_token_id"] for config in read] == [None]
    assert json.loads((tmp_path / "export/config.json").read_text())["eos_token_id"] == byte_tokenizer().end_of_text


def test_a_link_out_of_a_published_folder_is_not_exported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret, source, blobs = tmp_path / "secret", tmp_path / "snapshots/0", tmp_path / "blobs"
    for folder in (source, blobs, tmp_path / "out"):
        folder.mkdir(parents=True)
    secret.write_text("mine")
    (blobs / "1").write_text("free")
    (source / "LICENSE").symlink_to("../../blobs/1")  # as in the cache of the hub
    (source / "NOTICE").symlink_to(secret)
    text_side._copy_further_files(source, tmp_path / "out")
    assert [(path.name, path.read_text()) for path in (tmp_path / "out").iterdir()] == [("LICENSE", "free")]
    assert "NOTICE is a link to a file outside of its folder: it is not exported" in caplog.text
