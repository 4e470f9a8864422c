"""Which errors mean a full memory or a lost peer, and the file in which a rank writes its failure."""

import json
import re
from pathlib import Path

import pytest

from callbacks.memory import callback as memory
from recipes.runtime import failure
from recipes.runtime.failure import (
    Failure,
    get_error_file,
    is_host_out_of_memory,
    is_out_of_memory,
    is_peer_failure,
    read_failure,
    write_failure,
)
from recipes.runtime.own_code import name_own_code

ERRORS = [
    (RuntimeError("CUDA error: out of memory"), True),
    (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
    (RuntimeError("cannot allocate memory in static TLS block"), True),
    (OSError(12, "Cannot allocate memory"), True),
    (MemoryError(), True),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
    (RuntimeError("shapes do not match"), False),
    (OSError(28, "No space left on device"), False),
]


@pytest.mark.parametrize(("error", "is_full"), ERRORS)
def test_out_of_memory_errors_are_recognized_directly_and_as_a_cause(error: Exception, is_full: bool) -> None:
    wrapped = ValueError("a step failed")
    wrapped.__cause__ = error
    for is_out in (is_out_of_memory, memory.is_out_of_memory):
        assert is_out(error) is is_full
        assert is_out(wrapped) is is_full


def test_the_callbacks_have_the_same_pattern_of_out_of_memory_messages() -> None:
    """callbacks/ must not import recipes/, so it has a copy."""
    [copy] = [value for value in vars(memory).values() if isinstance(value, re.Pattern)]
    assert copy == failure._OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("error", "is_host"),
    [
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: out of memory"), False),
    ],
)
def test_host_memory_and_device_memory_are_told_apart(error: Exception, is_host: bool) -> None:
    assert is_host_out_of_memory(error) is is_host


@pytest.mark.parametrize(
    ("error", "caused_by_peer"),
    [
        (RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:31"), True),
        (RuntimeError("read: Connection reset by peer"), True),
        (RuntimeError("CUDA out of memory"), False),
        (OSError("broken pipe of the data"), False),
    ],
)
def test_only_a_lost_connection_of_torch_is_a_peer_failure(error: Exception, caused_by_peer: bool) -> None:
    assert is_peer_failure(error) == caused_by_peer


def test_a_failure_is_read_as_it_was_written_in_the_format_of_torchrun(tmp_path: Path) -> None:
    file = get_error_file({"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")})
    assert file is not None
    assert read_failure(file) is None
    written = Failure(exit_code=71, message="one line", report="all of it", time=12.5, caused_by_peer=True)
    write_failure(written, file)
    assert read_failure(file) == written
    message = json.loads(file.read_text())["message"]
    assert message["message"] == "one line"
    assert message["extraInfo"] == {"py_callstack": "all of it", "timestamp": "12"}


def test_without_the_variable_there_is_no_error_file() -> None:
    assert get_error_file({}) is None


def test_an_error_that_is_its_own_cause_is_read_once() -> None:
    first, second = RuntimeError("shapes do not match"), ValueError("of the batch")
    first.__cause__, second.__cause__ = second, first
    for error in (first, second):
        assert not is_out_of_memory(error)
        assert not memory.is_out_of_memory(error)
        assert name_own_code(error) is None
