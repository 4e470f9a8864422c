"""The encoding of a text that is not UTF-8 is named where its bytes show it, and nowhere else."""

# ruff: noqa: RUF001
import gzip
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.data.encodings import explain_not_utf8, guess_encoding

JAPANESE = "日本語のテキストです。これは機械学習のための文章であり、多くの漢字とかなを含んでいます。\n"
CHINESE = "汉字文本内容测试。这是一个用于训练语言模型的中文句子，包含许多常见的汉字。\n"
TRADITIONAL = "這是一個用於訓練語言模型的中文句子，包含許多常見的漢字。我們希望它能正確地被識別。\n"
KOREAN = "이것은 언어 모델을 훈련하기 위한 한국어 문장입니다. 많은 한글을 포함하고 있습니다.\n"
RUSSIAN = "Это предложение на русском языке для обучения языковой модели. Оно содержит много букв.\n"
FRENCH = "Le café est déjà fermé à Orléans, où l’été est très agréable; garçon, ça va?\n"
CZECH = "Příliš žluťoučký kůň úpěl ďábelské ódy, děti běží.\n"
TURKISH = "Bu Türkçe bir cümledir, şöyle böyle ığdır İstanbul.\n"


@pytest.mark.parametrize(
    ("text", "encoding", "found"),
    [
        (JAPANESE, "cp932", "cp932"),
        (JAPANESE, "euc-jp", "euc-jp"),
        (JAPANESE, "utf-16le", "utf-16le"),
        (CHINESE, "gb18030", "gb18030"),
        (CHINESE, "utf-16be", "utf-16be"),
        (TRADITIONAL, "big5", "big5"),
        (KOREAN, "euc-kr", "cp949"),
        (RUSSIAN, "windows-1251", "windows-1251"),
        (RUSSIAN, "koi8-r", "koi8-r"),
        (RUSSIAN, "utf-16le", "utf-16le"),
        (RUSSIAN, "iso8859-5", None),
        (FRENCH, "windows-1252", "windows-1252"),
        (FRENCH, "utf-16le", "utf-16le"),
        (FRENCH, "mac_roman", None),
        (CZECH, "windows-1250", None),
        (TURKISH, "windows-1254", None),
    ],
)
def test_the_encoding_of_a_text_is_found_or_unknown(text: str, encoding: str, found: str | None) -> None:
    for data in (text.encode(encoding), (text * 20).encode(encoding), (text * 20).encode(encoding)[:-1]):
        assert guess_encoding(data) == found


def test_random_bytes_have_no_encoding() -> None:
    assert guess_encoding(os.urandom(4096)) is None


@pytest.mark.parametrize(
    ("data", "pack", "reason", "expected"),
    [
        (("a" + JAPANESE).encode("cp932"), bytes, r"byte 1 is not UTF-8 .*; it looks like cp932", f"a{JAPANESE}"),
        (
            (FRENCH + "é").encode()[:-1],
            bytes,
            f"within a character, at byte {len(FRENCH.encode())}",
            FRENCH,
        ),
        (
            b"a\xed\xa0\xbd\xed\xb8\x80\xed\xa0\xbd",
            bytes,
            "byte 1 .*: it is CESU-8",
            "a😀\ufffd",
        ),
        (FRENCH.encode("windows-1252"), gzip.compress, "it looks like windows-1252", FRENCH),
        ("ä one\nö two\n".encode() + b"\xe4 bad\n", bytes, "byte 14 is not UTF-8", "ä one\nö two\n bad\n"),
    ],
    ids=["Japanese", "cut", "CESU-8", "compressed", "few"],
)
def test_what_is_typed_gives_the_text(
    data: bytes, pack: Callable[[bytes], bytes], reason: str, expected: str, tmp_path: Path
) -> None:
    path, new = tmp_path / "it's a.txt", tmp_path / "new.txt"
    path.write_bytes(pack(data))
    with pytest.raises(UnicodeDecodeError) as caught:
        data.decode()
    said, fix = explain_not_utf8(path, caught.value)
    assert re.search(reason, said)
    subprocess.run(fix.partition(", then")[0].replace("<new file>", f"'{new}'"), shell=True)
    assert new.read_text(encoding="utf-8") == expected
