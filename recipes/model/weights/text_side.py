"""Write everything of an export but its weights, and read it back: tokenizer, template, special ids, generation.

An export has to generate what `mode=sample` generates, and to stop where it stops.
"""

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from recipes.data.instructions.chat_template import find_stop_ids, find_template, prompt_for_answer
from recipes.errors import ConfigError
from recipes.files import write_atomically
from recipes.model.weights.files import SMALL_FILES, published_folder
from recipes.tokenizer import (
    GENERATION_FILE,
    MODEL_FILE,
    MORE_TEMPLATES,
    SETTINGS_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    Tokenizer,
    read_folder,
    read_published_ids,
)

log = logging.getLogger("lightning_recipes")

_NOT_COPIED = {MODEL_FILE, GENERATION_FILE, TOKENIZER_FILE, SETTINGS_FILE, TEMPLATE_FILE}  # written here
_NOT_COPIED |= {"chat_template.json", "adapter_config.json", "trainer_state.json", "all_results.json", "tekken.json"}
# all that readers of an export look for beside its weights: what one export lacks, it must not have from an earlier one
TEXT_FILES: tuple[str, ...] = (TOKENIZER_FILE, SETTINGS_FILE, TEMPLATE_FILE, GENERATION_FILE, MORE_TEMPLATES)
TEXT_FILES += ("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model")
# settings of generation under which transformers does not sample from the plain logits, or not greedily by default
_CHANGING: tuple[str, ...] = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
)
_CHANGING += ("num_beams", "min_length", "min_new_tokens", "suppress_tokens", "bad_words_ids", "forced_eos_token_id")
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

_MODULE = "tokenization_export"
_CODE = '''"""The tokenizer of this folder, exactly as tokenizer.json describes it."""

from transformers import PreTrainedTokenizerFast


class ExportedTokenizer(PreTrainedTokenizerFast):
    pass
'''
# transformers 5 replaces the pre-tokenizer of any qwen2 and qwen3_5 by that of the model type, whatever class
# tokenizer_config.json names (transformers#45920); a tokenizer with code of its own is loaded by its class
_WITH_CODE = {"auto_map": {"AutoTokenizer": [None, f"{_MODULE}.ExportedTokenizer"]}}

_HARD_TEXT = (
    "Grüße, 世界! ﬁ Å e\u0301 한국어 עברית \u200b👩‍👩‍👧 naïve  two   three\n\n\tdef f(x):\r\n        "
    "return x**2 - 1234567.89"
    " don't I'LL we've <tag>&amp; a.b_c/d\\e \u00a0 10,000 ½ ✓ ''  \n \n"
)
_MOST_SPELLED = 20_000  # vocabulary entries in the text that is compared: a fifth of a second


def load_exported_tokenizer(folder: Path, published: str | None) -> Tokenizer:
    """Return the tokenizer of a run with the special ids of the model that its weights came from.

    Args:
        folder: Tokenizer of the run.
        published: Folder or hub name of that model; None: there is none.

    Raises:
        ConfigError: A tokenizer file is missing or damaged.
    """
    tokenizer = Tokenizer.load(folder)
    source = None if published is None else published_folder(published)
    return tokenizer if source is None else tokenizer.with_ids_of(source)


def write_text_side(folder: Path, *, tokenizer: Tokenizer | None, published: str | None) -> None:
    """Write the tokenizer with its template, ids and settings of generation, and further files of the published model.

    Args:
        folder: Export with or without a config.json, into which the special ids are written.
        tokenizer: Tokenizer that the model was trained with; None: that of the published model, if there is one.
        published: Folder or hub name that the weights came from; None: they came from nowhere.

    Raises:
        ConfigError: transformers does not load the tokenizer as it was in training.
        OSError: A file cannot be written, or differs when read back.
    """
    source = None if published is None else published_folder(published)
    if published is not None and source is None:
        log.info("%s is gone: its settings of generation and licences are not exported", published)
    if tokenizer is None and source is not None and (source / TOKENIZER_FILE).is_file():
        tokenizer = read_folder(source)
        log.info("The data had no tokenizer: that of %s is exported", published)
        if tokenizer.first_tokens:
            shown = "".join(map(tokenizer.spell, tokenizer.first_tokens))
            log.info("It puts %s before every text; whether the tokens of the data had it is not known", shown)
    if source is not None and tokenizer is not None and not tokenizer.shares_vocabulary(source):
        source = None  # of the published model there is only the architecture: its ids are other tokens
    settings = _read(folder / GENERATION_FILE)
    ids = {name: _read(folder / MODEL_FILE).get(name) for name in _IDS}
    if source is not None:
        settings = _read(source / GENERATION_FILE) or settings
        ids |= read_published_ids(source)
        if source.resolve() != folder.resolve():
            _copy_further_files(source, folder)
    if tokenizer is not None:
        ids = {name: tokenizer.find_id(name) for name in ("bos", "pad")}
        ids = {f"{name}_token_id": id for name, id in ids.items()} | {"eos_token_id": [*find_stop_ids(tokenizer)]}
    if isinstance(ids["eos_token_id"], list) and len(ids["eos_token_id"]) == 1:
        [ids["eos_token_id"]] = ids["eos_token_id"]
    settings = {name: value for name, value in settings.items() if name not in _IDS and not name.startswith("_")}
    if (folder / MODEL_FILE).is_file():  # an adapter has none
        _write(folder / MODEL_FILE, dict(sorted((_read(folder / MODEL_FILE) | ids).items())))
    if tokenizer is not None:
        _save_as_loaded(tokenizer, folder)
        _log_start(tokenizer)
    _write(folder / GENERATION_FILE, settings | ids)
    _check_ids(folder, ids, settings)


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def _write(path: Path, value: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _copy_further_files(source: Path, folder: Path) -> None:
    """Copy the files that go with a published model and that nothing here writes."""
    for path in sorted({path for pattern in SMALL_FILES for path in source.glob(pattern)}):
        if path.is_file() and path.name not in _NOT_COPIED and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)


def _save_as_loaded(tokenizer: Tokenizer, folder: Path) -> None:
    """Save a tokenizer under the first class with which transformers gives the same ids and texts."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        tokenizer.save(folder)
        log.info("transformers is not installed: the exported tokenizer was not read back")
        return
    difference: str | None = None
    as_it_is = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": tokenizer.added_tokens}
    for settings in ({}, as_it_is, as_it_is | _WITH_CODE):
        tokenizer.save(folder, settings=settings)
        if "auto_map" in settings:
            write_atomically(folder / f"{_MODULE}.py", _CODE)
        first, difference = difference, _find_difference(tokenizer, folder)
        if difference is None:
            if settings:
                shown = "with code of its own" if "auto_map" in settings else "as PreTrainedTokenizerFast"
                log.info("The tokenizer is exported %s, since in the class it had %s", shown, first)
            return
    raise ConfigError(
        str(folder),
        f"in the tokenizer that transformers loads from it, {difference}",
        "PreTrainedTokenizerFast.from_pretrained(<the folder tokenizer/ of the run>) where the model is used, or train"
        " with tokenizer=of_model",
    )


def _find_difference(tokenizer: Tokenizer, folder: Path) -> str | None:
    """Return in what the tokenizer that transformers loads differs, as a clause; None if it is the same."""
    from transformers import AutoTokenizer

    try:
        return _compare(tokenizer, AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False))
    except Exception as error:  # whatever the class of a tokenizer raises
        return f"{type(error).__name__} is raised: {str(error).strip().partition(chr(10))[0]}"


def _compare(tokenizer: Tokenizer, loaded: Any) -> str | None:
    for text in _hard_texts(tokenizer):
        expected = tokenizer.encode_start(text, reads_special_tokens=True)
        found = loaded(text)["input_ids"]
        if found != expected:
            return f"a text of {len(expected):,} tokens has {len(found):,}, or others"
        if loaded.decode(found, skip_special_tokens=False) != tokenizer.decode(expected):
            return "the same tokens are another text"
    if len(loaded) > tokenizer.vocab_size:
        return f"there are {len(loaded):,} tokens instead of {tokenizer.vocab_size:,}"
    if loaded.eos_token_id != tokenizer.end_of_text:
        return f"{loaded.eos_token_id} ends a text instead of {tokenizer.end_of_text}"
    if tokenizer.chat_template is not None:
        return _find_other_rendering(tokenizer, loaded)
    return None


def _hard_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield texts that different tokenizers split differently, with the special tokens and the vocabulary spelled."""
    special = sorted(tokenizer.special_ids)
    yield _HARD_TEXT
    yield "".join(
        f"{tokenizer.spell(id)}{part}" for id, part in zip(special, ("a", " b", "\n", "") * len(special), strict=False)
    )
    step = -(-tokenizer.vocab_size // _MOST_SPELLED)
    yield tokenizer.decode([id for id in range(0, tokenizer.vocab_size, step) if id not in special])


def _find_other_rendering(tokenizer: Tokenizer, loaded: Any) -> str | None:
    chat = [{"role": "user", "content": " 1 + 1?\n"}, {"role": "assistant", "content": "2"}]
    for messages, adds_prompt in ((chat[:1], True), (chat, False)):
        try:
            text, _ = find_template("auto", tokenizer).render(messages, tokenizer, adds_prompt=adds_prompt, tools=None)
        except ConfigError:
            continue  # a template that takes other conversations
        expected: list[int] = tokenizer.encode_rendered(text).ids
        options: dict[str, Any] = {"add_generation_prompt": adds_prompt, "return_dict": True}
        if loaded.apply_chat_template(messages, **options)["input_ids"] != expected:
            return "a conversation is rendered differently"
    return None


def _log_start(tokenizer: Tokenizer) -> None:
    """Log that conversations begin without what the tokenizer puts before every other text, where that is so."""
    if tokenizer.chat_template is None or not tokenizer.first_tokens:
        return
    try:
        tokens, _ = prompt_for_answer("?", tokenizer)
    except ConfigError:
        return
    if tokens[: len(tokenizer.first_tokens)] != tokenizer.first_tokens:
        log.info(
            "Conversations began without %s, which the tokenizer puts before any other text: apply_chat_template leaves"
            " it out, too; add_special_tokens=False where a rendered conversation is tokenized",
            "".join(map(tokenizer.spell, tokenizer.first_tokens)),
        )


def _check_ids(folder: Path, ids: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Read back the ids as transformers does; drop settings of generation that it refuses."""
    changing = [f"{name}={json.dumps(settings[name])}" for name in _CHANGING if settings.get(name) is not None]
    if changing:
        shown = ", ".join(changing)
        log.info("%s keeps %s of the published model, which mode=sample does not apply", GENERATION_FILE, shown)
    try:
        from transformers import AutoConfig, GenerationConfig
    except ImportError:
        return
    try:
        read = [GenerationConfig.from_pretrained(str(folder))]
    except ValueError as error:
        reason = str(error).strip().partition("\n")[0]
        log.warning("transformers refuses the settings of generation of the published model (%s): dropped", reason)
        _write(folder / GENERATION_FILE, ids)
        read = [GenerationConfig.from_pretrained(str(folder))]
    if (folder / MODEL_FILE).is_file():
        read.append(AutoConfig.from_pretrained(str(folder)))
    for config in read:
        for name, value in ids.items():
            if getattr(config, name, None) != value:
                raise OSError(
                    f"{folder}: {type(config).__name__} reads {name} as {getattr(config, name, None)}, not {value}"
                )
