"""Published tokenizer: `tokenizer.json` from a folder or the Hugging Face hub, downloaded once."""

import contextlib
from pathlib import Path

from recipes.errors import ConfigError
from recipes.tokenizer import (
    GENERATION_FILE,
    MODEL_FILE,
    SETTINGS_FILE,
    SPECIAL_TOKENS_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    TextCorpus,
    Tokenizer,
    read_folder,
)


class HuggingFace:
    """Tokenizer of a published model, with its original ids.

    Args:
        name: A folder that contains `tokenizer.json`, or a hub id such as "gpt2".
    """

    def __init__(self, *, name: str) -> None:
        self.name = name

    def make(self, corpus: TextCorpus) -> Tokenizer:
        """Load the tokenizer; the corpus is ignored.

        Raises:
            ConfigError: The tokenizer does not exist, cannot be downloaded, or has no end-of-text token.
        """
        try:
            return read_folder(self._folder())
        except ConfigError:
            raise
        except ValueError as error:
            raise self._error(str(error)) from error

    def _folder(self) -> Path:
        """Return the folder of the tokenizer."""
        folder = Path(self.name).expanduser()
        if folder.is_dir():
            if not (folder / TOKENIZER_FILE).is_file():
                raise self._error("the folder has no tokenizer.json")
            return folder
        if self.name.startswith((".", "/", "~")):
            raise self._error("there is no such folder")
        return self._download()

    def _download(self) -> Path:
        try:
            from huggingface_hub import hf_hub_download
            from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError
        except ImportError as error:
            raise ConfigError(
                f"tokenizer.name={self.name}",
                "it is not a local folder, and a download from the hub needs huggingface-hub, which is not installed",
                "pip install -e '.[huggingface]', or tokenizer.name=<folder with tokenizer.json>",
            ) from error
        try:
            tokenizer_file = Path(hf_hub_download(self.name, TOKENIZER_FILE))
        except (OSError, ValueError, HfHubHTTPError) as error:
            first_line = str(error).strip().partition("\n")[0]
            raise self._error(f"its tokenizer.json could not be downloaded from the hub ({first_line})") from error
        for name in (SETTINGS_FILE, TEMPLATE_FILE, SPECIAL_TOKENS_FILE, GENERATION_FILE, MODEL_FILE):
            with contextlib.suppress(EntryNotFoundError):  # a repository need not have one
                hf_hub_download(self.name, name)
        return tokenizer_file.parent

    def _error(self, reason: str) -> ConfigError:
        return ConfigError(
            f"tokenizer.name={self.name}",
            reason,
            "tokenizer.name=<folder with tokenizer.json>, which works offline, or another hub id",
        )
