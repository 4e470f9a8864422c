"""Published tokenizer: `tokenizer.json` from a folder or the Hugging Face hub, downloaded once."""

import contextlib
import json
import logging
import os
from pathlib import Path

from recipes.errors import ConfigError, python, type_extra, type_setting
from recipes.files import count
from recipes.foreign_file import reading
from recipes.shipped_models import is_shipped
from recipes.tokenizer import (
    ADDED_TOKENS_FILE,
    GENERATION_FILE,
    MODEL_FILE,
    MORE_TEMPLATES,
    READ_FIX,
    SETTINGS_FILE,
    SPECIAL_TOKENS_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    TextCorpus,
    Tokenizer,
    read_folder,
)

log = logging.getLogger("lightning_recipes")

_FURTHER_FILES = (
    *(SETTINGS_FILE, TEMPLATE_FILE, SPECIAL_TOKENS_FILE, ADDED_TOKENS_FILE),
    *(GENERATION_FILE, MODEL_FILE),
)
_LOOKED_AT, _SHOWN = 1_000_000, 10  # characters of the text whose loss is counted, and those that are shown
_BPE = ("vocab.json", "merges.txt")
_NAMING = (SETTINGS_FILE, MODEL_FILE)  # say which tokenizer of transformers reads the files beside them
# vocabularies that transformers converts: files, and the packages that read them
_OTHER_FORMATS = {
    "SentencePiece": (("*.model",), "transformers sentencepiece protobuf"),
    "tiktoken": (("*.tiktoken", "tekken.json"), "transformers tiktoken"),
    "WordPiece or BPE": (("vocab.txt", "vocab.json", "merges.txt"), "transformers"),
}


class HuggingFace:
    """Tokenizer of a published model, with its original ids.

    Args:
        name: A folder that contains `tokenizer.json`, or a hub id such as "gpt2".
    """

    def __init__(self, *, name: str) -> None:
        self.name = name

    def make(self, corpus: TextCorpus) -> Tokenizer:
        """Load the tokenizer; of the corpus, only the characters that it leaves out are counted.

        Raises:
            ConfigError: The tokenizer does not exist, cannot be downloaded, or has no end-of-text token.
        """
        setting = f"tokenizer.name={self.name}"
        folder = Path(os.path.expanduser(self.name))
        with reading(folder, setting, READ_FIX):  # a name may be too long, or have a NUL
            is_folder, is_file = folder.is_dir(), folder.is_file()
        if is_file:
            fix = type_setting("tokenizer.name", folder.parent) if folder.name == TOKENIZER_FILE else READ_FIX
            raise ConfigError(setting, "it is a file, and a tokenizer is the folder that it is in", fix)
        if is_shipped(self.name):
            reason = "it is the configuration of a model that comes without a tokenizer"
            raise ConfigError(setting, reason, "tokenizer=bpe, or tokenizer=bytes")
        if not is_folder and self.name.startswith((".", "/", "~")):
            raise self._error("there is no such folder")
        if not is_folder:
            folder = self._download()
        elif not (folder / TOKENIZER_FILE).is_file():
            raise self._explain_folder(folder)
        tokenizer = read_folder(folder, setting=setting, fix=READ_FIX)
        dropped, num_seen = tokenizer.count_dropped(corpus, num_characters=_LOOKED_AT)
        if dropped:
            log.warning(
                "%s: %s of the first %s of the text (%.2g %%) %s not in its vocabulary and left out: %s",
                *(setting, count(dropped.total(), "character"), f"{num_seen:,}", 100 * dropped.total() / num_seen),
                "is" if dropped.total() == 1 else "are",
                " ".join(json.dumps(char, ensure_ascii=False) for char, _ in dropped.most_common(_SHOWN)),
            )
        return tokenizer

    def _download(self) -> Path:
        try:
            from huggingface_hub import hf_hub_download, snapshot_download
            from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
        except ImportError as error:
            raise ConfigError(
                f"tokenizer.name={self.name}",
                "it is not a local folder, and a download from the hub needs huggingface-hub, which is not installed",
                f"{type_extra('huggingface')}, or tokenizer.name=<folder with tokenizer.json>",
            ) from error
        try:
            tokenizer_file = Path(hf_hub_download(self.name, TOKENIZER_FILE))
            with contextlib.suppress(EntryNotFoundError):  # offline, there is what was downloaded before
                snapshot_download(self.name, allow_patterns=[*_FURTHER_FILES, f"{MORE_TEMPLATES}/*.jinja"])
        except (OSError, ValueError, HfHubHTTPError) as error:
            first_line = str(error).strip().partition("\n")[0]
            raise self._error(f"its tokenizer could not be downloaded from the hub ({first_line})") from error
        return tokenizer_file.parent

    def _explain_folder(self, folder: Path) -> ConfigError:
        """Return the error for a folder without a tokenizer.json, with how to make one of another vocabulary there."""
        setting = f"tokenizer.name={self.name}"
        if all((folder / name).is_file() for name in _BPE) and not any((folder / name).is_file() for name in _NAMING):
            made = "ByteLevelBPETokenizer(*sys.argv[1:3]).save(sys.argv[3])"
            files = [folder / name for name in (*_BPE, TOKENIZER_FILE)]
            reason = f"the folder has no tokenizer.json, but {' and '.join(_BPE)}, as of GPT-2"
            command = python(f"import sys; from tokenizers import ByteLevelBPETokenizer; {made}", *files)
            return ConfigError(setting, reason, f"{command}, then the same command")
        for kind, (patterns, packages) in _OTHER_FORMATS.items():
            if found := sorted(path.name for pattern in patterns for path in folder.glob(pattern)):
                made = "AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])"
                code = f"import sys; from transformers import AutoTokenizer; {made}"
                reason = f"the folder has no tokenizer.json, but {found[0]}, a vocabulary of {kind}"
                command = python(code, folder, f"{folder}-fast")
                fix = f"pip install {packages}; {command}, then {type_setting('tokenizer.name', f'{folder}-fast')}"
                return ConfigError(setting, reason, fix)
        return self._error("the folder has no tokenizer.json")

    def _error(self, reason: str) -> ConfigError:
        return ConfigError(f"tokenizer.name={self.name}", reason, READ_FIX)
