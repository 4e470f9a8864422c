"""A reward function in a file of the user's: it is executed once, and what is wrong with it is named."""

from pathlib import Path

import pytest

from recipes.errors import ConfigError
from recipes.reward.mine import OwnFunction

CODE = """
from dataclasses import dataclass

@dataclass
class Rule:
    field: str

def right_field(prompts, completions, references, rows):
    return [float(row[Rule("answer").field] == text) for text, row in zip(completions, rows)]

NUMBER = 3
"""


def test_the_function_is_called_with_the_four_lists(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    reward = OwnFunction(path=f"{tmp_path}/mine.py:right_field", weight=2.0)
    reward.load()
    given = {"prompts": ["a", "b"], "completions": ["1", "2"], "references": ["", ""]}
    assert reward(**given, rows=[{"answer": "1"}, {"answer": "1"}]) == [1.0, 0.0]
    assert reward.weight == 2.0


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none.py:right_field", "there is no such Python file"),
        ("mine.py:other", "has no function 'other'"),
        ("mine.py:NUMBER", "has no function 'NUMBER'"),
        ("broken.py:right_field", "the file raises ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_that_cannot_be_used_is_a_mistake(path: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match=message):
        OwnFunction(path=f"{tmp_path}/{path}", weight=1.0).load()
