"""The lock of a run folder that cannot be written is a mistake about that folder."""

from pathlib import Path

import pytest

from recipes.errors import ConfigError
from recipes.run_folder import LOCK_FILE
from recipes.runtime.lock import lock_run_folder


def test_a_lock_that_is_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).mkdir()
    with pytest.raises(ConfigError, match="Is a directory"), lock_run_folder(tmp_path):
        pass


def test_a_lock_that_rejects_its_text_is_named(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).symlink_to("/dev/full")
    with pytest.raises(ConfigError, match="cannot be written: "), lock_run_folder(tmp_path):
        pass


def test_the_holder_is_named_in_the_file(tmp_path: Path) -> None:
    with lock_run_folder(tmp_path):
        assert (tmp_path / LOCK_FILE).read_text(encoding="utf-8").startswith("process ")
