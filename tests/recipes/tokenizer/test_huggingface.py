"""Published tokenizers, from a folder; tests never access the hub."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
from exported_models import Text, make_backend
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from typed_remedies import run_command

from recipes.errors import ConfigError
from recipes.tokenizer.bytes import byte_tokenizer
from recipes.tokenizer.huggingface import HuggingFace

REMEDY = "tokenizer.name=<folder with tokenizer.json>, which works offline, or another hub id"


@pytest.fixture
def folder(tmp_path):
    byte_tokenizer().save(tmp_path)
    return tmp_path


def test_a_folder_gives_the_ids_of_the_library(folder):
    tokenizer = HuggingFace(name=str(folder)).make(None)
    assert tokenizer.encode("né") == [110, 195, 169]
    assert tokenizer.end_of_text == 256


def test_the_end_of_text_token_comes_from_the_settings(folder):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for eos in ("<|endoftext|>", {"content": "<|endoftext|>"}, None):
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": eos}))
        assert HuggingFace(name=str(folder)).make(None).end_of_text == 256
    (folder / "tokenizer_config.json").unlink()
    assert HuggingFace(name=str(folder)).make(None).end_of_text == 256


def test_other_settings_are_preserved_when_saved_again(folder):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": "hello"}))
    HuggingFace(name=str(folder)).make(None).save(folder / "again")
    saved = json.loads((folder / "again/tokenizer_config.json").read_text())
    assert saved["chat_template"] == "hello"


@pytest.fixture
def words(tmp_path):
    """Publish a byte-level tokenizer, changed by settings, and return what is read from it."""

    def publish(settings=(), *, like_sentencepiece=False, has_start=False, **files):
        text = Text(like_sentencepiece, has_start, has_several_ends=False, has_template=False)
        backend = make_backend(text)
        if "post_processor" in files:
            backend.post_processor = files.pop("post_processor")
        backend.save(str(tmp_path / "tokenizer.json"))
        settings = {"eos_token": "</s>"} | dict(settings)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return HuggingFace(name=str(tmp_path)).make(None)

    return publish


def test_a_text_starts_with_what_the_tokenizer_puts_before_it_once(words):
    tokenizer = words(has_start=True)
    [start] = tokenizer.first_tokens
    plain = tokenizer.encode("loss")
    assert start not in plain
    assert tokenizer.encode_start("loss") == [start, *plain]
    assert tokenizer.encode_start("") == [start]
    # typed by a person, the start is itself; in a data set it is five characters
    assert tokenizer.encode_start("<s>loss", reads_special_tokens=True) == [start, *plain]
    assert tokenizer.encode_start("<s>loss") == [start, *tokenizer.encode("<s>loss")]
    assert words().encode_start("loss") == plain


def test_add_bos_token_is_in_the_saved_tokenizer_and_an_end_after_every_prompt_is_not(words, tmp_path):
    transformers = pytest.importorskip("transformers")
    named = {"bos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    ends = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", words().end_of_text)])
    both = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", words().encode_rendered("<s>").ids[0]), ("</s>", 266)]
    )
    for settings, post_processor, has_start in (
        ({"add_bos_token": True}, None, True),
        ({"add_bos_token": False}, None, False),
        ({"add_bos_token": True, "add_eos_token": True}, ends, True),
        ({}, ends, False),
        ({"add_bos_token": False}, both, True),  # transformers 5 reads tokenizer.json alone
    ):
        tokenizer = words(named | settings, post_processor=post_processor)
        assert len(tokenizer.first_tokens) == has_start
        tokenizer.save(tmp_path / "again")
        theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "again"))
        assert theirs("the loss")["input_ids"] == tokenizer.encode_start("the loss")


def test_a_continuation_is_what_new_tokens_add_to_the_text_of_the_prompt(words):
    tokenizer = words(like_sentencepiece=True)
    prompt, new = tokenizer.encode("the loss"), tokenizer.encode("the  end")
    assert tokenizer.decode(new) == "the  end", "alone, the blank before its first word is lost"
    assert tokenizer.decode_continuation(prompt, new) == " the  end"
    assert tokenizer.decode_continuation(prompt, []) == ""
    assert tokenizer.decode_continuation([], new) == "the  end"


@pytest.mark.parametrize("like_sentencepiece", [False, True])
def test_a_character_that_begins_in_the_prompt_ends_in_the_continuation(words, like_sentencepiece):
    tokenizer = words(like_sentencepiece=like_sentencepiece)
    tokens = tokenizer.encode("a世b")
    cut = len(tokens) - 2
    assert "\ufffd" in tokenizer.decode(tokens[:cut])
    assert tokenizer.decode_continuation(tokens[:cut], tokens[cut:]) == "世b"


def test_names_of_special_tokens_come_from_the_files_of_every_version(words):
    old = words({"eos_token": None}, special_tokens_map={"eos_token": {"content": "<|im_end|>"}, "bos_token": "<s>"})
    assert old.spell(old.end_of_text) == "<|im_end|>"
    assert old.special_tokens["bos_token"] == "<s>"
    # transformers ignores the older file if the newer one lists the added tokens
    new = words({"added_tokens_decoder": {}}, special_tokens_map={"eos_token": "<|im_end|>"})
    assert new.spell(new.end_of_text) == "</s>"
    end = new.encode_rendered("<|im_end|>").ids[0]
    by_config = words({"eos_token": None}, config={"eos_token_id": end}, special_tokens_map={})
    assert by_config.end_of_text == end


def test_a_name_without_an_id_is_left_out_and_one_that_is_not_special_becomes_it(words):
    tokenizer = words({"pad_token": "[PAD]", "sep_token": "the", "extra_special_tokens": ["<s>", "[X]"]})
    assert tokenizer.special_tokens == {"eos_token": "</s>", "sep_token": "the"}
    assert tokenizer.encode_rendered("the").ids[0] in tokenizer.special_ids


def test_a_text_ends_where_any_config_of_the_model_says(words):
    ends = words(generation_config={"eos_token_id": [9, 5]}, config={"eos_token_id": 7, "pad_token_id": -1})
    assert ends.end_ids == [9, 5, 7, ends.end_of_text]
    assert (ends.find_id("bos"), ends.find_id("pad")) == (None, None)
    named = words({"bos_token": "<s>", "pad_token": "</s>"}, generation_config={}, config={"bos_token_id": None})
    assert named.spell(named.find_id("bos")) == "<s>"
    assert named.find_id("pad") == named.end_of_text
    assert named.end_ids == [named.end_of_text]


def test_templates_with_names_are_read_and_saved_from_files_and_from_a_list(words, tmp_path):
    several = [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]
    assert words({"chat_template": several}).chat_template == "a"
    (tmp_path / "chat_template.jinja").write_text("c\n")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/rag.jinja").write_text("d")
    tokenizer = words({"chat_template": several})
    assert tokenizer.chat_template == "c\n", "a file of its own comes first, as in transformers"
    tokenizer.save(tmp_path / "again")
    saved = json.loads((tmp_path / "again/tokenizer_config.json").read_text())["chat_template"]
    assert saved == [{"name": "default", "template": "c\n"}, {"name": "rag", "template": "d"}]
    tokenizer.with_chat_template("e").save(tmp_path / "again")
    assert (tmp_path / "again/chat_template.jinja").read_text() == "e"
    assert HuggingFace(name=str(tmp_path / "again")).make(None).chat_template == "e"
    tokenizer.save(tmp_path / "again")
    assert not (tmp_path / "again/chat_template.jinja").exists(), "of another template"


def refuse(name):
    with pytest.raises(ConfigError) as caught:
        HuggingFace(name=name).make(None)
    return str(caught.value)


def test_folders_without_a_tokenizer_are_rejected(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    empty, missing = tmp_path / "empty", tmp_path / "missing"
    assert refuse(str(empty)) == (f"tokenizer.name={empty}: the folder has no tokenizer.json; type {REMEDY}")
    assert refuse(str(missing)) == (f"tokenizer.name={missing}: there is no such folder; type {REMEDY}")
    (folder / "tokenizer.json").write_text("{}")
    assert "tokenizer.json cannot be read: Exception" in refuse(str(folder))


@pytest.mark.parametrize(
    ("file", "reason", "fix"),
    [
        ("tokenizer.model", "but tokenizer.model, a vocabulary of SentencePiece", "sentencepiece protobuf; python -c"),
        ("qwen.tiktoken", "but qwen.tiktoken, a vocabulary of tiktoken", "transformers tiktoken; python -c"),
        (
            "vocab.txt",
            "but vocab.txt, a vocabulary of WordPiece",
            r'AutoTokenizer.from_pretrained\(.*" {} ',
        ),
    ],
)
def test_a_folder_with_the_vocabulary_of_another_library_is_answered_with_its_conversion(tmp_path, file, reason, fix):
    (tmp_path / file).write_text("x")
    with pytest.raises(ConfigError, match=reason) as caught:
        HuggingFace(name=str(tmp_path)).make(None)
    assert re.search(fix.format(tmp_path), caught.value.fix)
    assert caught.value.fix.endswith(f"tokenizer.name={tmp_path}-fast")


def test_a_file_is_answered_with_its_folder(folder):
    with pytest.raises(ConfigError, match=f"it is a file, .*; type tokenizer.name={folder}$"):
        HuggingFace(name=str(folder / "tokenizer.json")).make(None)


def test_random_merges_are_switched_off(words, tmp_path, caplog):
    words()
    plain = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(plain | {"model": plain["model"] | {"dropout": 0.5}}))
    with caplog.at_level("INFO", "lightning_recipes"):
        tokenizer = HuggingFace(name=str(tmp_path)).make(None)
    assert "skips merges at random (dropout 0.5): switched off" in caplog.text
    assert len({tuple(tokenizer.encode("the loss of the loss " * 9)) for _ in range(20)}) == 1
    assert json.loads(tokenizer.to_json())["model"]["dropout"] is None


def test_a_vocabulary_without_the_end_of_a_document_is_answered_with_one_that_it_has(folder):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({"eos_token": "</s>"}))
    assert refuse(str(folder)) == (
        f"tokenizer.name={folder}: its vocabulary has no end-of-text token </s>; type"
        f' "eos_token": "<|endoftext|>" in place of </s> in {path}, or {REMEDY}'
    )


def test_an_end_of_a_document_is_added_as_typed_in_the_error(tmp_path):
    backend = Backend(models.BPE({"a": 0, "b": 1}, []))
    backend.save(str(tmp_path / "tokenizer.json"))
    refused = refuse(str(tmp_path))
    assert "its vocabulary has no end-of-text token <|endoftext|>; type python -c" in refused
    run_command(refused.partition("; type ")[2], tmp_path)
    assert HuggingFace(name=str(tmp_path)).make(SimpleNamespace(texts=lambda _: iter([]))).end_of_text == 2


@pytest.mark.parametrize(
    "model",
    [
        models.WordLevel({"x": 0, "b": 1}, unk_token="[UNK]"),
        models.WordPiece({"x": 0, "b": 1}, unk_token="[UNK]"),
        models.Unigram([("x", -1.0), ("b", -2.0)], unk_id=None),
        models.BPE({"x": 0, "b": 1}, [], unk_token="[UNK]"),
    ],
    ids=lambda model: type(model).__name__,
)
def test_a_word_that_no_token_stands_for_is_named(tmp_path, model):
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    tokenizer = HuggingFace(name=str(tmp_path)).make(None)
    assert (tokenizer.encode("b x"), tokenizer.first_tokens, tokenizer.splits_at_lines) == ([1, 0], [2], False)
    for encode in (tokenizer.encode, tokenizer.encode_rendered):
        with pytest.raises(
            ConfigError, match="not in its vocabulary, nor a token for such: .*; type tokenizer=bpe, wh"
        ):
            encode("b y")


@pytest.mark.parametrize("blank", [None, "▁"])
def test_characters_that_a_vocabulary_leaves_out_are_counted(tmp_path, caplog, blank):
    backend = Backend(models.BPE({"x": 0, "</s>": 1} | ({} if blank is None else {blank: 2}), []))
    if blank is not None:
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    tokenizer = HuggingFace(name=str(tmp_path)).make(SimpleNamespace(texts=lambda _: iter(["xyx yé"])))
    assert tokenizer.encode("xyx")[-2:] == [0, 0]
    assert "characters that its vocabulary does not have are left out of every text" in caplog.text
    assert (
        '3 characters of the first 6 of the text (50 %) are not in its vocabulary and left out: "y" "é"' in caplog.text
    )


def test_the_files_of_gpt2_become_a_tokenizer_as_typed_in_the_error(tmp_path):
    vocab = {char: id for id, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"<|endoftext|>": 256}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    with pytest.raises(ConfigError, match="but vocab.json and merges.txt, as of GPT-2; type python -c") as caught:
        HuggingFace(name=str(tmp_path)).make(None)
    run_command(caught.value.fix, tmp_path)
    assert len(HuggingFace(name=str(tmp_path)).make(None).encode("a é")) == 4


def test_a_missing_hub_library_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert refuse("some/model") == (
        "tokenizer.name=some/model: it is not a local folder, and a download from the hub needs huggingface-hub, "
        "which is not installed; type pip install -e '.[huggingface]', "
        "or tokenizer.name=<folder with tokenizer.json>"
    )


def test_an_unreachable_hub_is_an_error_that_names_the_offline_way(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")

    def offline(*_):
        raise OSError("no connection\nand a long story")

    monkeypatch.setattr(hub, "hf_hub_download", offline)
    assert refuse("some/model") == (
        f"tokenizer.name=some/model: its tokenizer could not be downloaded from the hub (no connection); type {REMEDY}"
    )


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("tokenizer_config.json", "null", "does not hold an object"),
        ("tokenizer_config.json", "3", "does not hold an object"),
        ("tokenizer_config.json", "[" * 100_000, "RecursionError"),
        ("tokenizer_config.json", b"\xff\xfe", "iconv -f"),
        ("tokenizer_config.json", {"eos_token": 2}, "eos_token is 2, and not a text"),
        ("tokenizer_config.json", {"bos_token": {"text": "<s>"}}, "bos_token is {'text': '<s>'}, and not a text"),
        ("tokenizer_config.json", {"additional_special_tokens": [3]}, "is not a list of texts"),
        ("tokenizer_config.json", {"chat_template": 3}, "chat_template is neither a text nor texts with names"),
        ("tokenizer_config.json", {"chat_template": [3]}, "chat_template is neither a text nor texts with names"),
        ("tokenizer_config.json", {"chat_template": {"default": 3}}, "chat_template is neither"),
        ("tokenizer_config.json", {"added_tokens_decoder": 3}, "AttributeError"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}, "ValueError"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"999": {"content": "<new>"}}},
            "lists <new> with the id 999",
        ),
        ("special_tokens_map.json", "[]", "does not hold an object"),
        ("config.json", "{", "JSONDecodeError"),
        ("chat_template.jinja", b"\xff\xfe\x00", "UnicodeDecodeError"),
        ("additional_chat_templates/rag.jinja", b"\xff", "UnicodeDecodeError"),
        ("tokenizer.json", "", "is empty (0 bytes)"),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_named(folder, file, content, reason):
    (folder / file).parent.mkdir(exist_ok=True)
    written = json.dumps(content) if isinstance(content, dict) else content
    (folder / file).write_bytes(written if isinstance(written, bytes) else written.encode())
    found = refuse(str(folder))
    assert found.startswith(f"tokenizer.name={folder}: {folder / file} ")
    assert reason in found


@pytest.mark.parametrize("name", ["~nouser/x", "./" + "x" * 300, "./a\0b"])
def test_a_name_that_is_no_path_is_refused(name):
    assert refuse(name).startswith(f"tokenizer.name={name}: ")


def test_tokens_that_only_the_settings_list_have_the_ids_of_transformers(words, tmp_path):
    transformers = pytest.importorskip("transformers")
    size = words().vocab_size
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    listed = {str(size + i): {"content": f"<call{i}>", "special": i > 0} | flags for i in range(2)}
    named = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for settings, files in (
        ({"added_tokens_decoder": listed}, {}),
        ({}, {"added_tokens": {"<call0>": size, "<call1>": size + 1}}),  # of older versions
    ):
        tokenizer = words(named | settings, **files)
        theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
        text = "the <call0> end<call1>"
        assert tokenizer.encode_rendered(text).ids == theirs(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.vocab_size == size + 2
        assert (size + 1 in tokenizer.special_ids) == bool(settings)


def test_templates_in_an_object_have_its_names(words):
    tokenizer = words({"chat_template": {"default": "a", "tool_use": "b"}})
    assert tokenizer.chat_templates == {"default": "a", "tool_use": "b"}


@pytest.mark.parametrize("like_sentencepiece", [False, True])
def test_half_a_character_is_refused_by_every_tokenizer(words, like_sentencepiece):
    for tokenizer in (words(like_sentencepiece=like_sentencepiece), byte_tokenizer()):
        for encode in (tokenizer.encode, tokenizer.encode_rendered):
            with pytest.raises(ConfigError, match=r"it has \\ud800, half of a surrogate pair"):
                encode("a\ud800b")
