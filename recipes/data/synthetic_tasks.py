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
        shuffle_answers: bool,
        **settings: Any,
    ) -> None:
        """Store the settings.

        Args:
            tasks: Tasks, which the examples cycle through.
            num_examples: Number of examples, training and validation together.
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
        super().__init__(path="", format="prompt_completion", fields={}, val_path=None, split="train", **settings)
        self._rows_of_tasks = TaskRows(tasks, num_examples, shuffle_answers)

    @override
    def _open(self, name: str, path: str) -> Rows:
        return self._rows_of_tasks


class TaskRows:
    """Rows of prompt and completion, the same ones every time.

    Args:
        tasks: Tasks, which the rows cycle through.
        num_examples: Number of rows.
        shuffle_answers: Whether each prompt has the answer to another one.
    """

    def __init__(self, tasks: Sequence[str], num_examples: int, shuffle_answers: bool) -> None:
        self.name = f"{num_examples:,} examples of {', '.join(tasks)}"
        self._tasks = tasks
        self._num_examples = num_examples
        self._shuffle_answers = shuffle_answers

    @property
    def num_bytes(self) -> int:
        return sum(row.num_bytes for row in self)

    def content_hash(self, cache_dir: Path) -> str:
        return f"{self.name} {self._shuffle_answers}"

    def __iter__(self) -> Iterator[Row]:
        rng = random.Random(0)
        words = ["".join(rng.choices(_LETTERS, k=rng.choice(_LENGTHS))) for _ in range(self._num_examples)]
        others = words[1:] + words[:1] if self._shuffle_answers else words
        for index, (word, other) in enumerate(zip(words, others, strict=True)):
            task = self._tasks[index % len(self._tasks)]
            yield Row(f"example {index + 1}", {"prompt": f"{task}:{word}>", "completion": _ANSWERS[task](other)})
