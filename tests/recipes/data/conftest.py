"""Generated text, equal every time; no network, no fixture files."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.data.text.corpus import Corpus, Document

_SYLLABLES = ["ba", "ko", "ti", "ren", "sal", "mu", "vo", "pe", "lin", "dar", "é", "ß", "漢", "😀"]


def make_text(num_bytes: int, seed: int = 0) -> str:
    """Return lines of made-up words, some indented, some blank; at least `num_bytes` long."""
    source = random.Random(seed)
    words = ["".join(source.choices(_SYLLABLES, k=source.randint(1, 4))) for _ in range(500)]
    lines, size = [], 0
    while size < num_bytes:
        line = source.choice(["", "    ", ""]) + " ".join(source.choices(words, k=8)) + ";\n"
        line = source.choice([line, line, line, "\n", "\n\n  \n"])
        lines.append(line)
        size += len(line.encode())
    return "".join(lines)


@pytest.fixture
def text() -> Callable[..., str]:
    return make_text


@pytest.fixture
def make_corpus(tmp_path: Path) -> Callable[[dict[str, bytes]], Corpus]:
    """Return a function: files by name and content -> their corpus, with a cache next to them."""

    def make(contents: dict[str, bytes]) -> Corpus:
        folder = tmp_path / "texts"
        documents = []
        for name, content in contents.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            documents.append(Document.of(path, name=name))
        return Corpus(documents, cache_dir=tmp_path / "cache")

    return make
