"""Environment variables that torch parses on import are checked before a run folder exists."""

import pytest

from recipes.runtime.torch_variables import find_variables_of_torch


@pytest.mark.parametrize(
    ("variable", "value", "fix"),
    [
        ("TORCH_LOGS", "nope", "unset TORCH_LOGS"),
        ("TORCH_LOGS", "+dynamo,graph_break", "export TORCH_LOGS=+dynamo,graph_breaks"),
        ("TORCHINDUCTOR_COMPILE_THREADS", "four", "unset TORCHINDUCTOR_COMPILE_THREADS"),
    ],
)
def test_what_torch_cannot_parse_is_named(variable: str, value: str, fix: str) -> None:
    [mistake] = find_variables_of_torch({variable: value})
    assert (mistake.setting, mistake.fix) == (f"{variable}={value}", fix)


def test_what_torch_parses_is_no_mistake() -> None:
    environ = {"TORCH_LOGS": "+dynamo, -all,recompiles,torch.nn", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    assert find_variables_of_torch(environ) == []
    assert find_variables_of_torch({"TORCH_LOGS": ""}) == []
