import gzip
import json
import pickle
import subprocess
from pathlib import Path

import pytest

from recipes import foreign_file
from recipes.errors import ConfigError
from recipes.foreign_file import reading

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def _read(path: Path, error: BaseException) -> ConfigError:
    with pytest.raises(ConfigError) as caught, reading(path, "model.pretrained=m", "model.pretrained=<a folder>"):
        raise error
    return caught.value


@pytest.mark.parametrize(
    "error", [KeyError("x"), RecursionError("deep"), OSError(5, "no"), UnicodeError("bad"), TypeError()]
)
def test_whatever_a_parser_raises_becomes_one_error_in_three_clauses(tmp_path: Path, error: Exception) -> None:
    (tmp_path / "config.json").write_text("{}")
    mistake = _read(tmp_path / "config.json", error)
    assert (mistake.setting, mistake.fix) == ("model.pretrained=m", "model.pretrained=<a folder>")
    assert f"config.json cannot be read: {type(error).__name__}" in mistake.reason


def test_a_panic_of_rust_code_is_an_error_and_an_interrupt_is_not(tmp_path: Path) -> None:
    class PanicException(BaseException):
        pass

    assert "PanicException: index out of range" in _read(tmp_path / "t", PanicException("index out of range")).reason
    with pytest.raises(KeyboardInterrupt), reading(tmp_path / "t", "a=b", "a=c"):
        raise KeyboardInterrupt


@pytest.mark.parametrize("error", [MemoryError(), ConfigError("a=1", "why", "a=2")])
def test_missing_memory_and_errors_that_are_explained_pass_as_they_are(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as caught, reading(tmp_path, "model.pretrained=m", "other"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize(
    ("text", "reason", "fix"),
    [
        ("", "is empty (0 bytes)", "model.pretrained=<a folder>"),
        (POINTER, "is a Git LFS pointer", "git -C /"),
        ("<!DOCTYPE html><html>sign in", "is a web page", "model.pretrained=<a folder>"),
    ],
)
def test_what_a_failed_download_leaves_is_named(tmp_path: Path, text: str, reason: str, fix: str) -> None:
    (tmp_path / "model.safetensors").write_text(text)
    mistake = _read(tmp_path / "model.safetensors", ValueError("header too small"))
    assert reason in mistake.reason
    assert mistake.fix.startswith(fix)


@pytest.mark.parametrize(
    ("name", "renamed", "head", "reason"),
    [
        ("model.safetensors", "pytorch_model.bin", b"PK\x03\x04", "is a zip archive, as torch.save writes it"),
        ("pytorch_model.bin", "model.safetensors", b"\x10" + bytes(7) + b'{"a": 1}', "holds safetensors"),
        ("model.safetensors", "model.safetensors", gzip.compress(b"abc"), "is compressed with gzip"),
    ],
)
def test_weights_of_another_format_are_renamed_by_what_is_typed(
    tmp_path: Path, name: str, renamed: str, head: bytes, reason: str
) -> None:
    path = tmp_path / name
    path.write_bytes(head)
    mistake = _read(path, ValueError("header too large"))
    assert reason in mistake.reason
    subprocess.run(mistake.fix.removesuffix(", then the same command"), shell=True, check=True)
    assert (tmp_path / renamed).read_bytes() == (b"abc" if head.startswith(b"\x1f") else head)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("Unsupported global: GLOBAL os.system was not an allowed global", "it holds more than tensors (os.system)"),
        ("Unsupported operand 118", "it is no file that torch.save has written"),
    ],
)
def test_advice_to_run_the_code_in_a_file_is_not_passed_on(tmp_path: Path, message: str, reason: str) -> None:
    error = pickle.UnpicklingError(f"Weights only load failed. Set `weights_only` to `False`.\n{message}")
    assert _read(tmp_path / "x.pt", error).reason == f"{tmp_path / 'x.pt'} cannot be read: {reason}"


@pytest.mark.parametrize(
    ("encoding", "command"), [("utf-16", "iconv -f UTF-16 -t UTF-8"), ("utf-8-sig", "sed -i '1s/^\\xEF\\xBB\\xBF//'")]
)
def test_a_config_in_another_encoding_is_converted_by_what_is_typed(
    tmp_path: Path, encoding: str, command: str
) -> None:
    path = tmp_path / "a config.json"
    path.write_text('{"a": "é"}', encoding=encoding)
    mistake = _read(path, ValueError("no JSON"))
    typed, _, rest = mistake.fix.partition(", then the same command")
    assert typed.startswith(command)
    assert not rest
    subprocess.run(typed, shell=True, check=True)
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "é"}


def test_a_file_that_may_not_be_read_is_not_said_to_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "f").write_text("x")
    monkeypatch.setattr(foreign_file, "open", refuse, raising=False)
    mistake = _read(tmp_path / "f", FileNotFoundError("No such file or directory"))  # as safetensors says
    assert mistake.reason == f"you may not read {tmp_path}/f"
    assert mistake.fix == f"chmod u+r {tmp_path}/f, then the same command"


def test_a_reason_on_the_second_line_is_shown(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    error = ValueError("Validation error for field 'hidden_size':\n    TypeError: expected int, got str\nmore")
    assert _read(tmp_path / "f", error).reason.endswith("field 'hidden_size': TypeError: expected int, got str")


def test_a_long_message_is_cut(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    assert len(_read(tmp_path / "f", ValueError("y" * 10_000)).reason) < 600
