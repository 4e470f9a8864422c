"""A run folder belongs to one run: no other is started, resumed or finished in it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.config.check.paths import check_run_folder
from recipes.config.compose import Composed, claim_folder, compose_run
from recipes.entry.run import run_composed


@pytest.fixture(scope="module")
def composed() -> Composed:
    return compose_run([])


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[[str], Path]:
    """Make the folder of a run that has written something."""

    def make(name: str) -> Path:
        checkpoint = tmp_path / name / "checkpoints" / "step_0000001.ckpt"
        checkpoint.mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text("{}")
        (tmp_path / name / "metrics.csv").write_text("step,train/loss\n1,2.5\n")
        return tmp_path / name

    return make


def test_a_run_is_resumed_in_its_own_folder_or_in_a_new_one_never_in_that_of_another(
    composed: Composed, make_run: Callable[[str], Path], tmp_path: Path
) -> None:
    first, second = make_run("first"), make_run("second")

    def mistakes(resume: str | None, folder: Path, *, continues: bool = False) -> list[str]:
        config = composed.config | {"resume": resume}
        return [mistake.setting for mistake in check_run_folder(config, folder, continues=continues)]

    assert mistakes(str(first), second) == [f"resume={first} hydra.run.dir={second}"]
    assert mistakes(str(first / "checkpoints" / "step_0000001.ckpt"), second)
    assert mistakes(None, first) == [f"hydra.run.dir={first}"]
    assert mistakes(str(first), first) == []
    assert mistakes(str(first / "checkpoints" / "step_0000001.ckpt"), tmp_path / "." / "first") == []
    assert mistakes(str(first), tmp_path / "new") == []
    assert mistakes("auto", first) == []
    # a sweep that goes on starts its own jobs again
    assert mistakes(str(first), second, continues=True) == []


def test_a_run_that_waited_for_the_lock_looks_again_and_leaves_the_folder_as_it_is(
    composed: Composed, make_run: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    # checked before the other start wrote anything
    folder = make_run("shared")
    before = (folder / "metrics.csv").read_bytes()
    assert run_composed(replace(composed, run_folder=folder)) == 2
    assert f"hydra.run.dir={folder}" in capsys.readouterr().out
    assert (folder / "metrics.csv").read_bytes() == before


def test_starts_of_the_same_second_get_folders_of_their_own(composed: Composed, tmp_path: Path) -> None:
    folder = tmp_path / "2026-01-02_03-04-05"
    starts = [replace(composed, run_folder=folder)] * 8
    with ThreadPoolExecutor(8) as threads:
        claimed = {start.run_folder.name for start in threads.map(claim_folder, starts)}
    assert claimed == {folder.name, *(f"{folder.name}_{number}" for number in range(2, 9))}
    # a folder that is typed, or resumed, is what was meant
    typed = replace(composed, run_folder=folder, overrides=[f"hydra.run.dir={folder}"])
    resumed = replace(composed, run_folder=folder, config=composed.config | {"resume": str(folder)})
    assert [claim_folder(run).run_folder for run in (typed, resumed)] == [folder, folder]
