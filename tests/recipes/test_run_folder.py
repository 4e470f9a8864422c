"""What a mode may replace, and what is read of a run folder that others have written."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from recipes.errors import ConfigError
from recipes.run_folder import (
    FROZEN,
    PAGE_MARK,
    IsOwn,
    claim_output,
    has_keys,
    has_run,
    is_bounded,
    is_page,
    is_summary,
    may_replace,
    read_config,
)


@pytest.mark.parametrize(
    ("name", "own", "is_own"),
    [
        ("report.html", f"<!doctype html><html><head>{PAGE_MARK}</head></html>", is_page),
        ("plan.json", '{"num_parameters": 3, "peak_memory_gib": 1.0, "steps": 2}', has_keys("num_parameters")),
        ("summary.json", '{"status": "finished"}', is_summary),
    ],
)
def test_a_mode_replaces_its_own_file_and_no_other(name: str, own: str, is_own: IsOwn, tmp_path: Path) -> None:
    file = tmp_path / name
    for content in ("", own):
        file.write_text(content)
        assert claim_output(file, "mode.path", is_file=True, replaces=is_own) == file
        assert claim_output(tmp_path, "mode.path", replaces={name: is_own}) == tmp_path
    others = [
        b"mine",
        b"{}",
        b'{"mine": 1}',
        b"[1]",
        b"[" * 100_000,
        b"<!doctype html><html></html>",
        b"\xff\xfe",
        b"\0",
    ]
    for other in others:
        file.write_bytes(other)
        with pytest.raises(ConfigError, match="it would be replaced") as raised:
            claim_output(file, "mode.path", is_file=True, replaces=is_own)
        free = tmp_path / f"{file.stem}_2{file.suffix}"
        assert raised.value.fix == f"mode.path={free}"
        assert claim_output(raised.value.fix.partition("=")[2], "mode.path", is_file=True, replaces=is_own) == free
        with pytest.raises(ConfigError, match="it would be replaced"):
            claim_output(tmp_path, "mode.path", replaces={name: is_own})
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigError, match="it is a folder, and a file is written"):
        claim_output(file, "mode.path", is_file=True, replaces=is_own)


def test_a_device_takes_what_is_written_and_a_large_file_is_not_read(tmp_path: Path) -> None:
    assert may_replace(Path(os.devnull), is_page)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 30)
    assert not may_replace(tmp_path / "large", lambda _: True)


def test_a_link_to_nothing_is_made_a_folder_by_what_is_typed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("new place")
    with pytest.raises(ConfigError, match="link is a link to new place, which does not exist") as raised:
        claim_output(tmp_path / "link", "mode.path")
    subprocess.run(raised.value.fix.partition(", then")[0], shell=True, check=True)
    assert claim_output(tmp_path / "link", "mode.path").is_dir()


@pytest.mark.parametrize("is_file", [True, False])
def test_a_user_that_does_not_exist_has_no_home_and_no_name_is_no_place(is_file: bool) -> None:
    with pytest.raises(ConfigError, match=r"mode\.path=~nobody_here/x: there is no such user; type mode\.path=<a f"):
        claim_output("~nobody_here/x", "mode.path", is_file=is_file)
    with pytest.raises(ConfigError, match=r"mode\.path=: it names no f"):
        claim_output("", "mode.path", is_file=is_file)


def test_a_folder_is_a_runs_if_a_run_was_started_in_it(tmp_path: Path) -> None:
    assert not has_run(tmp_path)
    (tmp_path / "config.yaml").write_text(FROZEN)
    assert not has_run(tmp_path), "one file of a run has been put there"
    (tmp_path / "events.jsonl").touch()
    assert has_run(tmp_path), "a copy without hidden files"
    started = tmp_path / "started"
    started.mkdir()
    (started / ".lock").write_text("process 1 on here\n")
    assert not has_run(started), "a sweep locks its folder, too"
    (started / "train.log").touch()
    assert has_run(started)


def test_a_config_expands_to_as_many_values_as_that_of_a_run(tmp_path: Path) -> None:
    loop: dict[str, object] = {}
    loop["loop"] = loop
    assert not is_bounded(loop)
    assert is_bounded([0] * 99_000)
    assert not is_bounded([0] * 100_001)
    levels = "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))
    for text in (
        f"a0: &a0 [x]\n{levels}",
        "a: &a [*a]\n",
        "a: " + "[" * 3_000 + "]" * 3_000,
        "? [a]\n: b\n",
        "a: 1-1-1",
    ):
        (tmp_path / "config.yaml").write_text(text)
        if text == "a: 1-1-1":
            assert read_config(tmp_path) == {"a": "1-1-1"}
            continue
        with pytest.raises(ConfigError) as raised:
            read_config(tmp_path)
        assert raised.value.setting == str(tmp_path / "config.yaml")


def test_the_json_of_each_mode_is_known_again() -> None:
    assert has_keys("a", "b")(json.dumps({"a": 1, "b": 2, "c": 3}))
    assert not has_keys("a", "b")(json.dumps({"a": 1}))
