"""Write everything of an export but its weights, and read it back: tokenizer, template, special ids, generation.

An export has to generate what `mode=sample` generates, and to stop where it stops.
"""

import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recipes.data.conversations.chat_template import find_stop_ids, find_template, prompt_for_answer
from recipes.errors import ConfigError
from recipes.files import write_atomically
from recipes.model.weights.files import SMALL_FILES, WEIGHT_FILES, published_folder, read_settings
from recipes.run_folder import EXPORT_RECORD
from recipes.tokenizer import (
    CODE_SETTINGS,
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
_NOT_COPIED |= {EXPORT_RECORD}  # of the export of another run
_MODULE = "tokenization_export"
# all that readers of an export look for: what one export lacks, it must not have from an earlier one, of whatever kind
EXPORT_FILES: tuple[str, ...] = (MODEL_FILE, *WEIGHT_FILES, GENERATION_FILE, TOKENIZER_FILE, SETTINGS_FILE)
EXPORT_FILES += (TEMPLATE_FILE, MORE_TEMPLATES, "special_tokens_map.json", "added_tokens.json", "vocab.json")
EXPORT_FILES += ("merges.txt", "tokenizer.model", f"{_MODULE}.py", "model.onnx", "model.onnx.data")
EXPORT_FILES += ("processor_config.json", "preprocessor_config.json")
# settings of generation that change neither the text nor where it ends; all others are logged
_HARMLESS: tuple[str, ...] = ("transformers_version", "use_cache", "cache_implementation", "cache_config")
_HARMLESS += ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states")
_HARMLESS += ("compile_config", "disable_compile")
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

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
_CAPTION = "a photo of 2 dogs"
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
    """Write the text side of an export whose weights are written, or that has none; see `writing_text_side`."""
    with writing_text_side(folder, tokenizer=tokenizer, published=published):
        pass


@contextmanager
def writing_text_side(folder: Path, *, tokenizer: Tokenizer | None, published: str | None) -> Iterator[None]:
    """Write the tokenizer with its template, ids and settings of generation, and further files of the published model.

    The tokenizer is written and compared on entry, before the weights, which take minutes; the ids on exit, into the
    configs that were written with the weights.

    Args:
        folder: Export with a config.json, by which transformers chooses the class of a tokenizer; an adapter has none.
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
            log.info("It puts %s before every text; unknown whether the training tokens included it", shown)
    if source is not None and tokenizer is not None and not tokenizer.shares_vocabulary(source):
        source = None  # of the published model there is only the architecture: its ids are other tokens
    if source is not None and source.resolve() != folder.resolve():
        _copy_further_files(source, folder)
    if (folder / MODEL_FILE).is_file():
        # without ids, transformers takes those of the model type, which may be outside of this vocabulary, and warns
        _write(folder / MODEL_FILE, dict.fromkeys(_IDS) | _without_code(_read(folder / MODEL_FILE)))
    if tokenizer is not None:
        settings = _read(folder / GENERATION_FILE)
        _save_as_loaded(tokenizer, folder)
        _write(folder / GENERATION_FILE, settings)  # the tokenizer was saved with ids alone
        _log_start(tokenizer)
    yield
    _write_ids(folder, tokenizer, source)


def end_texts(folder: Path, *, max_seq_len: int) -> None:
    """Let the tokenizer of an export end every text, where a model of captions reads it, as in training.

    It cuts and pads them as in training, too. That of a language model does not end them: an end after a prompt would
    leave nothing to continue.

    Args:
        folder: The export.
        max_seq_len: Tokens that the model reads.

    Raises:
        OSError: transformers gives other ids.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    tokenizer, file = read_folder(folder), folder / TOKENIZER_FILE
    backend: Any = Backend.from_file(str(file))
    first, end = [*map(tokenizer.spell, tokenizer.first_tokens)], backend.id_to_token(tokenizer.end_of_text)
    known = [(text, backend.token_to_id(text)) for text in {*first, end}]
    backend.post_processor = TemplateProcessing(single=[*first, "$A", end], special_tokens=known)
    write_atomically(file, backend.to_str(pretty=True))
    padding = tokenizer.find_id("pad")
    settings = _read(folder / SETTINGS_FILE) | {"model_max_length": max_seq_len}
    _write(folder / SETTINGS_FILE, settings | {"pad_token": end if padding is None else tokenizer.spell(padding)})
    expected = [*tokenizer.first_tokens, *tokenizer.encode(_CAPTION), tokenizer.end_of_text]
    found = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)(_CAPTION).input_ids
    if found != expected:
        raise OSError(f"{file}: transformers reads {_CAPTION!r} as {found}, not {expected}")


def _write_ids(folder: Path, tokenizer: Tokenizer | None, source: Path | None) -> None:
    """Write the special ids into both configs, and keep the settings of generation of the published model."""
    settings, config = _read(folder / GENERATION_FILE), _without_code(_read(folder / MODEL_FILE))
    ids = {name: config.get(name) for name in _IDS}
    if source is not None:
        settings = _read(source / GENERATION_FILE) or settings
        ids |= read_published_ids(source)
    if tokenizer is not None:
        ids = {name: tokenizer.find_id(name) for name in ("bos", "pad")}
        ids = {f"{name}_token_id": id for name, id in ids.items()} | {"eos_token_id": [*find_stop_ids(tokenizer)]}
    if isinstance(ids["eos_token_id"], list) and len(ids["eos_token_id"]) == 1:
        [ids["eos_token_id"]] = ids["eos_token_id"]
    settings = {name: value for name, value in _without_code(settings).items() if name not in _IDS and name[0] != "_"}
    if config:  # an adapter has none
        _write(folder / MODEL_FILE, dict(sorted((config | ids).items())))
    _write(folder / GENERATION_FILE, settings | ids)
    _check_ids(folder, ids, settings)


def _read(path: Path) -> dict[str, Any]:
    return read_settings(path, f"model.pretrained={path.parent}") if path.is_file() else {}


def _write(path: Path, value: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _without_code(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without those that name Python code of the published model, which is not exported."""
    return {name: value for name, value in settings.items() if name not in CODE_SETTINGS}


def _copy_further_files(source: Path, folder: Path) -> None:
    """Copy the files that go with a published model and that nothing here writes."""
    for path in list_further_files(source):
        shutil.copyfile(path, folder / path.name)
        if path.name.endswith("_config.json") and any(name in path.read_text("utf-8") for name in CODE_SETTINGS):
            _write(folder / path.name, _without_code(_read(path)))


def list_further_files(source: Path | None) -> list[Path]:
    """Return the files that go with a published model and that nothing here writes; none without a model."""
    if source is None:
        return []
    found = []
    for path in sorted({path for pattern in SMALL_FILES for path in source.glob(pattern)}):
        if not path.is_file() or path.name in _NOT_COPIED or path.name.endswith(".index.json"):
            continue
        if _is_inside(path, source):
            found.append(path)
        else:
            log.warning("%s is a link to a file outside of its folder: it is not exported", path)
    return found


def _is_inside(path: Path, source: Path) -> bool:
    """Return whether a file of a published model, which may be a link, lies in its folder or in the hub's cache of it.

    A downloaded folder may link to files of the user, which an export is not to hand on.
    """
    roots = [source.resolve()]
    if source.parent.name == "snapshots":  # the hub's cache: snapshots/<revision>/config.json -> ../../blobs/<hash>
        roots.append((source.parent.parent / "blobs").resolve())
    return any(path.resolve().is_relative_to(root) for root in roots)


def _save_as_loaded(tokenizer: Tokenizer, folder: Path) -> None:
    """Save a tokenizer under the first class with which transformers gives the same ids and texts."""
    try:
        import transformers
    except ImportError:
        tokenizer.save(folder)
        log.info("transformers is not installed: the exported tokenizer was not read back")
        return
    difference: str | None = None
    plain_class = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": tokenizer.added_tokens}
    for settings in ({}, plain_class, plain_class | _WITH_CODE):
        tokenizer.save(folder, settings=settings)
        if "auto_map" in settings:
            write_atomically(folder / f"{_MODULE}.py", _CODE)
        first, difference = difference, _find_difference(tokenizer, folder)
        if difference is None:
            if settings:
                shown = "with code of its own" if "auto_map" in settings else "as PreTrainedTokenizerFast"
                log.info("The tokenizer is exported %s, because %s", shown, first)
            return
    raise ConfigError(
        f"transformers=={transformers.__version__}",
        f"its tokenizer is not the one of the training, {difference}",
        "pip install -U transformers, and export again; mode=sample does without an export",
    )


def _find_difference(tokenizer: Tokenizer, folder: Path) -> str | None:
    """Return what transformers does differently with the tokenizer in a folder, as a clause; None if nothing."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        difference = _compare(tokenizer, loaded)
    except Exception as error:  # whatever the class of a tokenizer raises
        return f"its class raises {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return None if difference is None else f"{type(loaded).__name__} tokenizes differently: {difference}"


def _compare(tokenizer: Tokenizer, loaded: Any) -> str | None:
    for text in _hard_texts(tokenizer):
        # unlike `encode_start`, transformers repeats first tokens that a text begins with
        expected: list[int] = [*tokenizer.first_tokens, *tokenizer.encode_rendered(text).ids]
        found = loaded(text)["input_ids"]
        if found != expected:
            if len(found) != len(expected):
                return f"{len(found):,} ids instead of {len(expected):,}"
            different = sum(a != b for a, b in zip(found, expected, strict=True))
            return f"{different:,} of {len(expected):,} ids are others"
        if loaded.decode(found, skip_special_tokens=False) != tokenizer.decode(expected):
            return "the same ids are another text"
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
    changing = {name: value for name, value in settings.items() if name not in _HARMLESS and value is not None}
    if changing:
        shown = ", ".join(f"{name}={json.dumps(value)}" for name, value in changing.items())
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
        read.append(AutoConfig.from_pretrained(str(folder), trust_remote_code=False))
    for config in read:
        for name, value in ids.items():
            if getattr(config, name, None) != value:
                raise OSError(
                    f"{folder}: {type(config).__name__} reads {name} as {getattr(config, name, None)}, not {value}"
                )
