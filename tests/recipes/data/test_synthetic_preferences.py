"""Pairs of answers to letter tasks: the chosen one is right, and the other has two letters in each other's place."""

from recipes.data.synthetic_preferences import _PairRows
from recipes.data.synthetic_tasks import TaskRows


def test_each_pair_has_the_right_answer_and_one_with_two_neighbours_swapped() -> None:
    rows = [row.content for row in _PairRows(1000)]
    right = {row.content["prompt"]: row.content["completion"] for row in TaskRows(["rev", "sort"], 1000, False)}
    assert len(rows) > 990
    for row in rows:
        assert isinstance(row, dict)
        assert row["chosen"] == right[row["prompt"]]
        different = [at for at, (a, b) in enumerate(zip(row["chosen"], row["rejected"], strict=True)) if a != b]
        assert len(different) == 2
        assert different[1] == different[0] + 1
        assert sorted(row["chosen"]) == sorted(row["rejected"])
