"""Published tokenizer: `tokenizer.json` from a folder or the Hugging Face hub, downloaded once."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from recipes.errors import ConfigError
from recipes.tokenizer import END_OF_TEXT, TextCorpus, Tokenizer, token_text

_SETTINGS_FILE = "tokenizer_config.json"
_TEMPLATE_FILE = "chat_template.jinja"


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
        tokenizer_file, settings_file, template_file = self._files()
        try:
            backend = Backend.from_file(str(tokenizer_file))
        except Exception as error:  # the library raises no narrower class
            raise self._error(f"{tokenizer_file} is not a valid tokenizer file ({error})") from error
        settings: dict[str, Any] = {}
        if settings_file is not None:
            try:
                settings = json.loads(settings_file.read_text(encoding="utf-8"))
            except ValueError as error:
                raise self._error(f"{settings_file} is not valid JSON ({error})") from error
        if template_file is not None:
            settings["chat_template"] = template_file.read_text(encoding="utf-8")
        eos_token = END_OF_TEXT
        if "eos_token" in settings and settings["eos_token"] is not None:
            eos_token = token_text(settings["eos_token"])
        end_of_text = backend.token_to_id(eos_token)
        if end_of_text is None:
            raise self._error(f"its vocabulary has no end-of-text token {eos_token}")
        return Tokenizer(backend, end_of_text=end_of_text, settings=settings | {"eos_token": eos_token})

    def _files(self) -> tuple[Path, Path | None, Path | None]:
        """Return the paths of tokenizer, settings and chat template; the latter two are optional."""
        folder = Path(self.name).expanduser()
        if folder.is_dir():
            if not (folder / "tokenizer.json").is_file():
                raise self._error("the folder has no tokenizer.json")
            found = [folder / name if (folder / name).is_file() else None for name in (_SETTINGS_FILE, _TEMPLATE_FILE)]
            return folder / "tokenizer.json", found[0], found[1]
        if self.name.startswith((".", "/", "~")):
            raise self._error("there is no such folder")
        return self._download()

    def _download(self) -> tuple[Path, Path | None, Path | None]:
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
            tokenizer_file = Path(hf_hub_download(self.name, "tokenizer.json"))
        except (OSError, ValueError, HfHubHTTPError) as error:
            first_line = str(error).strip().partition("\n")[0]
            raise self._error(f"its tokenizer.json could not be downloaded from the hub ({first_line})") from error
        others: list[Path | None] = []
        for name in (_SETTINGS_FILE, _TEMPLATE_FILE):
            try:
                others.append(Path(hf_hub_download(self.name, name)))
            except EntryNotFoundError:  # a repository need not have one
                others.append(None)
        return tokenizer_file, others[0], others[1]

    def _error(self, reason: str) -> ConfigError:
        return ConfigError(
            f"tokenizer.name={self.name}",
            reason,
            "tokenizer.name=<folder with tokenizer.json>, which works offline, or another hub id",
        )
