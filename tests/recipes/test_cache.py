"""A cache folder is built by one process and appears by one rename."""

import os
import socket

import pytest

from recipes.cache import build_once, open_cache_dir
from recipes.errors import ConfigError


def is_complete(folder):
    return (folder / "done").is_file()


def build(folder):
    (folder / "done").write_text("yes")


def test_a_complete_folder_is_not_built_again(tmp_path):
    build_once(tmp_path / "x", build, is_complete=is_complete)
    build_once(tmp_path / "x", lambda _: pytest.fail("built twice"), is_complete=is_complete)
    assert is_complete(tmp_path / "x")


def test_a_builder_that_fails_leaves_nothing_but_an_open_lock(tmp_path):
    def fail(folder):
        build(folder)
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        build_once(tmp_path / "x", fail, is_complete=is_complete)
    assert [path.name for path in tmp_path.iterdir()] == [".x.lock"]
    build_once(tmp_path / "x", build, is_complete=is_complete)
    assert is_complete(tmp_path / "x")


def test_leftovers_of_dead_builders_are_removed_and_those_of_other_hosts_after_a_day(tmp_path):
    ours = tmp_path / f".x.tmp.{socket.gethostname()}.1"
    fresh, stale, foreign = (tmp_path / name for name in (".x.tmp.far.1", ".x.tmp.far.2", "y"))
    for folder in (ours, fresh, stale, foreign):
        folder.mkdir()
    os.utime(stale, (1000, 1000))
    build_once(tmp_path / "x", build, is_complete=is_complete)
    assert not ours.exists()
    assert not stale.exists()
    assert fresh.exists()
    assert foreign.exists()


def test_a_cache_that_cannot_be_created_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="it is a file, or in a file, and not a folder"):
        open_cache_dir(str(tmp_path / "file" / "folder"))
    with pytest.raises(ConfigError) as caught:
        open_cache_dir(str(tmp_path / "file"))
    assert caught.value.setting == f"data.cache_dir={tmp_path / 'file'}"
    assert caught.value.reason == "it is a file, or in a file, and not a folder"
    assert caught.value.fix == ("RECIPES_CACHE=<folder> before the command, or data.cache_dir=<folder>")


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_cache_dir("~/cache") == tmp_path / "cache"
