"""Commands that an error prints read a file whatever its name is, and run nothing that is in the name."""

import bz2
import gzip
import lzma
import shutil
from pathlib import Path

import pytest
from typed_remedies import run_command

from recipes.data.compression import convert, find_compression, unpack

PACKINGS = {"gzip": gzip.compress, "bzip2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("compression", PACKINGS)
def test_a_file_of_any_name_is_unpacked_and_converted(
    compression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, new = Path("-a';touch pwned;'$(touch pwned).txt"), tmp_path / "new file"
    path.write_bytes(PACKINGS[compression](b"text"))
    assert find_compression(path.read_bytes()) == compression
    if shutil.which("gunzip") and shutil.which("bunzip2") and shutil.which("unxz"):
        for command in (unpack(path, compression), convert("cat", path)):
            run_command(command, new)
            assert new.read_bytes() == b"text"
    path.write_bytes(b"plain")
    run_command(convert("cat", path), new)
    assert new.read_bytes() == b"plain"
    assert not Path("pwned").exists()
