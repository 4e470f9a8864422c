"""A crash in code of one's own ends with the name of that code, its file and its line."""

from pathlib import Path
from typing import Any

import dataset_cases
import pytest
from support import execute
from torch.utils.data import DataLoader

from recipes.entry.own_code import name_own_code
from recipes.runtime.exit_codes import ExitCode

CASES = dataset_cases.__file__


def fail(call: Any) -> BaseException:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_named_also_by_a_loader_process(num_workers: int) -> None:
    error = fail(lambda: next(iter(DataLoader(dataset_cases.Incomplete(), num_workers=num_workers))))
    said = name_own_code(error)
    assert said is not None
    name = "dataset_cases.Incomplete.__getitem__" if num_workers == 0 else "__getitem__"
    assert said.startswith(f"{name} failed, {CASES} line ")
    assert said.endswith(": KeyError: 'price'")


def test_an_error_of_this_project_names_nobody() -> None:
    from recipes.data.random_images import RandomImages

    error = fail(RandomImages)
    error.__traceback__ = None  # of this test
    assert name_own_code(error) is None


def test_a_run_ends_with_the_line_of_the_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["task=regression", "data=dataset", "data.target_kind=values", "model._target_=dataset_cases.Perceptron"]
    typed += [f"data.{split}._target_=dataset_cases.Incomplete" for split in ("train", "val")]
    assert execute(*typed, f"hydra.run.dir={tmp_path / 'run'}") == ExitCode.CRASHED
    *_, own, last = capsys.readouterr().out.strip().splitlines()
    assert own.startswith(f"dataset_cases.Incomplete.__getitem__ failed, {CASES} line ")
    assert last.startswith("The run crashed")
