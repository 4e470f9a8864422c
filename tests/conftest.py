"""Every test: one thread, its own cache and a quiet Lightning."""

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Token caches of tests never meet those of the person who runs them."""
    os.environ["RECIPES_CACHE"] = str(tmp_path_factory.getbasetemp() / "cache")


@pytest.fixture
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of 24 small texts with structure to learn, the same on every machine."""
    folder = tmp_path_factory.getbasetemp() / "texts"
    if not folder.is_dir():
        folder.mkdir()
        for number in range(24):
            lines = [
                f"{word} = {number * index % 97}\n" for index, word in enumerate("abcdefgh" * 12)
            ]
            (folder / f"text_{number:02d}.txt").write_text("".join(lines))
    return str(folder)
