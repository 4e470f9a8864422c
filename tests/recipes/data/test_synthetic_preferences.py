"""Letter tasks: right and mixed answers, pairs of them, and questions that no training split of the three data has."""

from pathlib import Path
from typing import Any

from recipes.data.synthetic_preferences import SyntheticPreferences, _PairRows
from recipes.data.synthetic_prompts import SyntheticPrompts
from recipes.data.synthetic_tasks import SyntheticTasks, TaskRows
from recipes.tokenizer.bytes import Bytes

TASKS = ["rev", "sort"]


def _read(rows: Any) -> list[dict[str, str]]:
    return [row.content for row in rows]


def test_each_pair_has_the_right_answer_and_one_with_two_neighbours_swapped() -> None:
    rows = _read(_PairRows(1000, "right"))
    right = {row["prompt"]: row["completion"] for row in _read(TaskRows(TASKS, 1000))}
    assert len(rows) > 990
    for row in rows:
        assert row["chosen"] == right[row["prompt"]]
        different = [at for at, (a, b) in enumerate(zip(row["chosen"], row["rejected"], strict=True)) if a != b]
        assert len(different) == 2
        assert different[1] == different[0] + 1
        assert sorted(row["chosen"]) == sorted(row["rejected"])


def test_mixed_answers_are_half_in_capitals_by_the_word_and_half_of_sort_is_downwards_by_chance() -> None:
    right, mixed = _read(TaskRows(TASKS, 4000)), _read(TaskRows(TASKS, 4000, is_mixed=True))
    turned = []
    for one, other in zip(right, mixed, strict=True):
        assert one["prompt"] == other["prompt"]
        task, word = other["prompt"].rstrip(">").split(":")
        assert other["completion"].isupper() is (word[0] >= "n")
        small = other["completion"].lower()
        assert small in (one["completion"], one["completion"][::-1] if task == "sort" else one["completion"])
        if task == "sort" and one["completion"] != one["completion"][::-1]:
            turned.append(small != one["completion"])
    assert 0.45 < sum(turned) / len(turned) < 0.55


def test_small_letters_are_preferred_to_the_same_mixed_answer_in_capitals() -> None:
    mixed = _read(TaskRows(TASKS, 1000, is_mixed=True))
    for row, answered in zip(_read(_PairRows(1000, "small_letters")), mixed, strict=True):
        assert row["prompt"] == answered["prompt"]
        assert row["chosen"] == answered["completion"].lower()
        assert row["rejected"] == row["chosen"].upper()


def test_the_questions_of_few_examples_are_in_no_training_split_of_more_examples_pairs_or_prompts(
    tmp_path: Path,
) -> None:
    common: dict[str, Any] = {"chat_template": "auto", "val_fraction": 0.1, "tokenizer": Bytes(), "seq_len": 64}
    common |= {"cache_dir": str(tmp_path), "num_processes": 1}
    tasks: dict[str, Any] = {"tasks": TASKS, "shuffle_answers": False, "train_on": "answers", "packing": False} | common
    sizes: dict[str, Any] = {"num_generations": 8, "num_iterations": 1, "max_new_tokens": 12, "global_batch_size": 8}
    asked = SyntheticTasks(num_examples=1000, mixed_answers=False, **tasks)
    trained: list[Any] = [
        SyntheticTasks(num_examples=3000, mixed_answers=True, **tasks),
        SyntheticPreferences(num_examples=2000, prefer="small_letters", packing=False, **common),
        SyntheticPrompts(num_examples=2000, **sizes, **common),
    ]
    asked.prepare()
    questions = {asked.tokenizer.decode(prompt) for prompt, _ in asked.questions(400)}
    assert 70 < len(questions) < 130
    for source in trained:
        source.prepare()
        _, stores, rows = source._ready()
        train = {stores["train"].place(int(example)) for example in rows["train"].examples}
        prompts = {row.place: row.content["prompt"] for row in source._open("path", "")}
        assert len(train) > 1500
        assert not questions & {prompts[place] for place in train}
