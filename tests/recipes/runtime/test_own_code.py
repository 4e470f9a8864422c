"""A crash in code of one's own ends with the name of that code, its file and its line."""

from pathlib import Path
from typing import Any

import dataset_cases
import pytest
from hydra.errors import InstantiationException
from support import execute
from torch.utils.data import DataLoader

from recipes.config.instantiate import make
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.own_code import name_own_code

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
    assert said.startswith(f"dataset_cases.Incomplete.__getitem__ failed, {CASES} line ")
    assert said.endswith(": KeyError: 'price'")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_own_code_is_named_where_a_library_raises(num_workers: int) -> None:
    error = fail(lambda: next(iter(DataLoader(dataset_cases.Ragged(), num_workers=num_workers))))
    said = name_own_code(error)
    assert said is not None
    assert said.startswith(f"dataset_cases.Ragged.__getitem__ failed, {CASES} line ")
    assert ": RuntimeError: stack expects each tensor to be equal size" in said


def test_of_two_errors_the_one_that_was_not_handled_is_named() -> None:
    def read() -> None:
        try:
            int("a")
        except ValueError:
            raise KeyError("there is no column 'a'")  # noqa: B904  as people write it

    assert "KeyError: \"there is no column 'a'\"" in str(name_own_code(fail(read)))


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


def test_a_type_error_in_a_constructor_is_a_crash_of_its_line_and_no_wrong_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["task=regression", "data=dataset", "data.target_kind=values", "model._target_=dataset_cases.Perceptron"]
    typed += [f"data.{split}={{_target_: dataset_cases.Failing, size: 8}}" for split in ("train", "val")]
    assert execute(*typed, f"hydra.run.dir={tmp_path / 'run'}") == ExitCode.CRASHED
    *_, own, last = capsys.readouterr().out.strip().splitlines()
    assert own.startswith(f"dataset_cases.Failing.__init__ failed, {CASES} line ")
    assert own.endswith(": TypeError: object of type 'int' has no len()")
    assert last.startswith("The run crashed")


def test_a_call_that_its_signature_rejects_is_a_wrong_setting() -> None:
    with pytest.raises(InstantiationException, match="missing 1 required"):
        make({"_target_": "dataset_cases.Failing"})
    with pytest.raises(TypeError, match="has no len"):
        make({"_target_": "dataset_cases.Failing", "size": 8})
