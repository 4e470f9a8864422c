"""Callbacks that come after the module's own hooks: they write the row of a step and save it.

Lightning calls the hooks of a module after those of all callbacks. A checkpoint would lack what `on_train_batch_end`
and `on_validation_end` of the module change, such as an average of the weights or the state of a generator, and a
resumed run would go on without it.
"""

from typing import Any

import lightning.pytorch as lightning
from lightning.pytorch.callbacks import Callback
from typing_extensions import override


class AfterModule(Callback):
    """A callback whose `end_batch` and `end_validation` come after the module's own hooks.

    A module with `recipes_calls_last = True` calls them itself, at the end of its hooks.
    """

    def end_batch(self, trainer: lightning.Trainer, pl_module: Any, outputs: Any) -> None:
        """Act on the end of a training batch.

        Args:
            trainer: Trainer of the run.
            pl_module: The task.
            outputs: What Lightning passes to `on_train_batch_end`.
        """

    def end_validation(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """Act on the end of a validation.

        Args:
            trainer: Trainer of the run.
            pl_module: The task.
        """

    @override
    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not getattr(pl_module, "recipes_calls_last", False):
            self.end_batch(trainer, pl_module, outputs)

    @override
    def on_validation_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        if not getattr(pl_module, "recipes_calls_last", False):
            self.end_validation(trainer, pl_module)
