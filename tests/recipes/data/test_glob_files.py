"""A pattern gives each file once, however folders are linked."""

from pathlib import Path

import pytest

from recipes.data.glob_files import expand_glob


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("a.txt", "b/c.txt", "b/d/e.txt", "b/.hidden/f.txt", "b/.g.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    (tmp_path / "b" / "up").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "b" / "d" / "round").symlink_to(tmp_path / "b", target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("**/*.txt", ["a.txt", "b/c.txt", "b/d/e.txt"]),
        ("b/**", ["b/c.txt", "b/d/e.txt"]),
        ("b/**/*.txt", ["b/c.txt", "b/d/e.txt"]),
        ("*/c.txt", ["b/c.txt"]),
        ("b/u*/a.t?t", ["b/up/a.txt"]),  # a link that the pattern itself names
        ("b/.h*/*.txt", ["b/.hidden/f.txt"]),
        ("**.txt", ["a.txt"]),
        ("[ab].txt", ["a.txt"]),
        ("a.txt", ["a.txt"]),
        ("nothing/**", []),
    ],
)
def test_every_file_once_and_no_folder_through_a_link_back(pattern: str, names: list[str], folder: Path) -> None:
    found = [path.as_posix() for path in expand_glob(pattern) if path.is_file()]
    assert sorted(found) == names
    absolute = [path.relative_to(folder).as_posix() for path in expand_glob(str(folder / pattern)) if path.is_file()]
    assert sorted(absolute) == names
