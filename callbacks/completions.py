"""Write some of the completions that a policy learns from, with their rewards, to completions.jsonl."""

import json
from typing import Annotated, Any

from lightning.pytorch import LightningModule, Trainer
from typing_extensions import override

from .files import LineFile
from .lightning_packages import Callback
from .logged_step import StepCounter, completed_steps, run_folder
from .protocols import SupportsCompletions


class Completions(Callback):
    """Writes the completions of the newest rollout to `completions.jsonl`, some of every `every_n_steps`-th step.

    Useful for seeing what earns a reward: a policy finds what its reward function allows, which is not always what was
    meant. Rank 0 appends `{"step", "prompt", "completion", "reference", "reward", "advantage", "tokens", "ended"}` and
    the scores of single functions, `reward/<name>`, in the order of the stream; the report shows the last ones.

    Args:
        every_n_steps: Optimizer steps between two steps of which completions are written.
        num_completions: How many of each of these steps.

    Raises:
        ValueError: An argument is outside its range.

    Example:
        >>> completions = Completions(every_n_steps=10, num_completions=16)
        >>> trainer = Trainer(callbacks=[completions], accelerator="cpu", logger=False)
        >>> completions.num_completions
        16
    """

    def __init__(
        self, *, every_n_steps: Annotated[int, ">= 1"] = 10, num_completions: Annotated[int, ">= 1"] = 16
    ) -> None:
        super().__init__()
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps is {every_n_steps}; an interval is 1 or more steps; set every_n_steps=10")
        if num_completions < 1:
            raise ValueError(
                f"num_completions is {num_completions}; it is 1 or more; set callbacks.completions=null for none"
            )
        self.every_n_steps = every_n_steps
        self.num_completions = num_completions
        self._steps = StepCounter()
        self._file: LineFile | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps.start(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._steps.stepped(trainer) or not isinstance(pl_module, SupportsCompletions):
            return
        step, folder = completed_steps(trainer), run_folder(trainer)
        is_due = step % self.every_n_steps == 0 or step == 1 or trainer.should_stop
        if not (is_due and trainer.is_global_zero) or folder is None:
            return
        path = folder / "completions.jsonl"
        if self._file is None or self._file.path != path:
            self._file = LineFile(path)
        rows = pl_module.recipes_completions(self.num_completions)
        self._file.append([json.dumps({"step": step} | row, ensure_ascii=False) for row in rows])

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._file is not None:
            self._file.finish()
