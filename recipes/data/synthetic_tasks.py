"""Synthetic questions for first fine-tuning runs: reverse or sort letters."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from typing_extensions import override

from recipes.data.conversations.source import Conversations
from recipes.data.read_rows import Row, Rows
from recipes.errors import ConfigError

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_LENGTHS = range(4, 8)  # letters
_ANSWERS: dict[str, Callable[[str], str]] = {
    "rev": lambda letters: letters[::-1],
    "sort": lambda letters: "".join(sorted(letters)),
}


class SyntheticTasks(Conversations):
    """Examples such as `rev:abcd>` with the answer `dcba`, as prompts and completions."""

    fine_tunes: ClassVar[bool] = False

    def __init__(
        self,
        *,
        tasks: Annotated[list[Literal["rev", "sort"]], ">= 1"],
        num_examples: Annotated[int, ">= 100"],
        mixed_answers: bool,
        shuffle_answers: bool,
        **settings: Any,
    ) -> None:
        """Store the settings.

        Args:
            tasks: Tasks, which the examples cycle through.
            num_examples: Number of examples, training and validation together.
            mixed_answers: Answer as people do who were not told how: words from n to z in capitals, and `sort` in
                ascending or descending order, by chance.
            shuffle_answers: Give each question the answer to another one: a control from which nothing can be learned.
            **settings: As for `Conversations`.

        Raises:
            ConfigError: A task is unknown.
        """
        if not tasks:
            raise ConfigError("data.tasks=[]", "examples need a task", f"data.tasks=[{','.join(_ANSWERS)}]")
        for task in tasks:
            if task not in _ANSWERS:
                raise ConfigError(
                    f"data.tasks={tasks}", f"there is no task {task}", f"data.tasks=[{','.join(_ANSWERS)}]"
                )
        super().__init__(
            path="",
            format="prompt_completion",
            fields={},
            val_path=None,
            split="train",
            image_folder=None,
            image_token_id=None,
            image_seq_length=None,
            transform=None,
            **settings,
        )
        self._rows_of_tasks = TaskRows(tasks, num_examples, is_mixed=mixed_answers, is_shuffled=shuffle_answers)

    @override
    def _open(self, name: str, path: str) -> Rows:
        return self._rows_of_tasks


class TaskRows:
    """Rows of prompt and completion, the same ones every time.

    Args:
        tasks: Tasks, which the rows cycle through.
        num_examples: Number of rows.
        is_mixed: Whether answers differ in what was not asked for, see `mixed_answers` of `SyntheticTasks`.
        is_shuffled: Whether each prompt has the answer to another one.
    """

    def __init__(
        self, tasks: Sequence[str], num_examples: int, *, is_mixed: bool = False, is_shuffled: bool = False
    ) -> None:
        self.name = f"{num_examples:,} examples of {', '.join(tasks)}"
        self._tasks = tasks
        self._num_examples = num_examples
        self._is_mixed = is_mixed
        self._is_shuffled = is_shuffled

    @property
    def num_bytes(self) -> int:
        return sum(row.num_bytes for row in self)

    def content_hash(self, cache_dir: Path) -> str:
        return f"{self.name} {self._is_mixed} {self._is_shuffled}"

    def __iter__(self) -> Iterator[Row]:
        rng, rng_of_order = random.Random(0), random.Random(1)
        words = ["".join(rng.choices(_LETTERS, k=rng.choice(_LENGTHS))) for _ in range(self._num_examples)]
        others = words[1:] + words[:1] if self._is_shuffled else words
        for index, (word, other) in enumerate(zip(words, others, strict=True)):
            task = self._tasks[index % len(self._tasks)]
            answer = _ANSWERS[task](other)
            if self._is_mixed:
                if task == "sort" and rng_of_order.random() < 0.5:
                    answer = answer[::-1]
                if word[0] >= "n":
                    answer = answer.upper()
            yield Row(f"example {index + 1}", {"prompt": f"{task}:{word}>", "completion": answer})
