"""A manifest that is not exactly the one written is invalid, and the files are compared with what it says."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from recipes.checkpoint.manifest import (
    FileRecord,
    Manifest,
    find_content_fault,
    find_fault,
    hash_file,
    read_manifest,
)

CONTENT = b"0123456789"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a checkpoint of one file of ten bytes."""
    (tmp_path / "run.pt").write_bytes(CONTENT)
    record = FileRecord(bytes=10, xxh3_128=hash_file(tmp_path / "run.pt"))
    manifest = Manifest(
        step=7,
        world_size=2,
        strategy="FullyShardedDataParallel",
        versions={"torch": "2.13.0"},
        metrics={"val/loss": 0.1 + 0.2, "train/loss": float("inf")},
        files={"run.pt": record},
        ended=None,
    )
    (tmp_path / "manifest.json").write_text(manifest.text())
    return tmp_path


def test_a_manifest_is_read_exactly_as_written(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest.text() == (folder / "manifest.json").read_text()
    assert manifest.metrics == {"val/loss": 0.1 + 0.2, "train/loss": float("inf")}
    assert manifest.total_bytes == 10
    assert find_fault(folder) is None
    assert find_content_fault(folder, manifest, manifest.files) is None


def test_every_single_flipped_bit_of_a_manifest_is_detected(folder: Path) -> None:
    path = folder / "manifest.json"
    written = path.read_bytes()
    for bit in range(8 * len(written)):
        damaged = bytearray(written)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert read_manifest(folder) is None, f"bit {bit}"


@pytest.mark.parametrize("content", ["", "{}", "[]", "null", "3", '"text"', "{", "\0"])
def test_any_other_text_is_a_damaged_manifest(folder: Path, content: str) -> None:
    (folder / "manifest.json").write_text(content)
    assert read_manifest(folder) is None
    assert find_fault(folder) == "its manifest.json is damaged"


def test_a_manifest_of_another_format_is_rejected_even_with_a_correct_hash(folder: Path) -> None:
    fields = json.loads((folder / "manifest.json").read_text())
    own = [name for name in fields if name.startswith("hash_of_this_file")]
    assert len(own) == 1
    changed = {name: value for name, value in fields.items() if name not in own} | {"format": 2}
    dumped = json.dumps(changed, indent=2) + "\n"
    changed[own[0]] = xxhash.xxh3_128_hexdigest(dumped.encode())
    (folder / "manifest.json").write_text(json.dumps(changed, indent=2) + "\n")
    assert read_manifest(folder) is None
    assert find_fault(folder) == "it has format 2, which this version does not load: the one that saved it does"


def test_each_fault_is_described(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert manifest is not None
    assert find_fault(folder / "elsewhere") == "there is no such folder"
    (folder / "run.pt").write_bytes(CONTENT[::-1])
    assert find_fault(folder) is None  # by names and sizes
    assert find_content_fault(folder, manifest, ["run.pt"]) == ("run.pt is corrupt: hash mismatch")
    (folder / "run.pt").write_bytes(CONTENT[1:])
    assert find_fault(folder) == "run.pt has 9 bytes, not 10"
    (folder / "run.pt").unlink()
    assert find_fault(folder) == "run.pt is missing"
    assert find_content_fault(folder, manifest, ["run.pt"]) == ("run.pt cannot be read: No such file or directory")
    (folder / "manifest.json").unlink()
    assert find_fault(folder) == "its manifest.json is missing"


def test_the_hash_does_not_depend_on_the_chunks_in_which_a_file_is_read(tmp_path: Path) -> None:
    for size in (0, 1, (16 << 20) - 1, 16 << 20, (16 << 20) + 1):  # chunks have 16 MiB
        content = b"\1" * size
        (tmp_path / "file").write_bytes(content)
        assert hash_file(tmp_path / "file") == xxhash.xxh3_128_hexdigest(content)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/hostname", "a/b.safetensors", "..", ".", "", "a\\b"])
def test_a_manifest_that_names_a_file_outside_its_folder_is_damaged(name: str, folder: Path) -> None:
    manifest = read_manifest(folder)
    assert manifest is not None
    (folder.parent / "outside.safetensors").write_bytes(CONTENT)
    forged = replace(manifest, files={**manifest.files, name: manifest.files["run.pt"]})
    (folder / "manifest.json").write_text(forged.text())  # its own hash is right
    assert read_manifest(folder) is None
    assert find_fault(folder) == "its manifest.json is damaged"
