"""Access to all Lightning internals that the callbacks use, one function each; tested with Lightning 2.6.6."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn import Module


def get_callbacks(trainer: Trainer) -> list[Callback]:
    """Return the callbacks of a Trainer; a connector sets them, so that Lightning's annotations lack them."""
    untyped: Any = trainer
    callbacks: list[Callback] = untyped.callbacks
    return callbacks


def is_accumulating(trainer: Trainer) -> bool:
    """Return whether the current micro-batch only accumulates gradients, without an optimizer step."""
    return trainer.fit_loop._should_accumulate()


def get_logged_step(trainer: Trainer) -> int:
    """Return Lightning's step counter for logger rows; `set_logged_step` restores it."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def set_logged_step(trainer: Trainer, step: int) -> None:
    """Set Lightning's step counter for logger rows."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = step


def get_averaged_model(callback: Any) -> Module | None:
    """Return the averaged model of a `WeightAveraging` callback; None before setup."""
    model: Module | None = callback._average_model
    return model


def allow_saves_after(saver: Any, step: int) -> None:
    """Allow a ModelCheckpoint to save after `step` again; it would skip step numbers that it has already saved."""
    saver._last_global_step_saved = min(saver._last_global_step_saved, step)


def is_row_due(trainer: Trainer) -> bool:
    """Return whether Lightning writes a row at the end of the current step.

    With one optimizer, this is `(steps completed after this one) % log_every_n_steps == 0` or `trainer.should_stop`.
    """
    return trainer._logger_connector.should_update_logs


def get_key(pl_module: LightningModule, name: str) -> str:
    """Return the key under which Lightning stores a metric logged in the current hook."""
    return f"{pl_module._current_fx_name}.{name}"


def forget_metrics(trainer: Trainer, keys: Collection[str]) -> None:
    """Remove metrics from future rows: Lightning repeats a logged value until the end of the epoch."""
    if trainer._results is not None:
        for key in keys:
            trainer._results.pop(key, None)


def forget_row(trainer: Trainer) -> None:
    """Remove the current step's values from future rows: after a rollback, the next steps follow another one.

    The next `log` of a metric makes it valid again; means over the epoch are unaffected.
    """
    for metric in () if trainer._results is None else trainer._results.values():
        metric.has_reset = metric.has_reset or metric.meta.on_step


def get_monitored(trainer: Trainer) -> dict[str, Any]:
    """Return the values that ModelCheckpoint, EarlyStopping and ReduceLROnPlateau can monitor."""
    return {name: value.detach() for name, value in trainer.callback_metrics.items()}


def set_monitored(trainer: Trainer, values: Mapping[str, Any]) -> None:
    """Restore the values of `get_monitored`; those that were first logged since then stay, so that none is missing."""
    trainer._logger_connector._callback_metrics.update(values)


def call_after_row(trainer: Trainer, function: Callable[[], None]) -> None:
    """Call a function once at the end of the current batch, after all its hooks and its row, before validation.

    Args:
        trainer: The trainer, within `on_train_batch_end`.
        function: May change the step count: nothing else happens in this batch.
    """
    attributes = vars(trainer._logger_connector)
    write_row = trainer._logger_connector.update_train_step_metrics

    def write_row_and_call() -> None:
        attributes.pop(_WRITE_ROW, None)
        write_row()
        function()

    attributes[_WRITE_ROW] = write_row_and_call


_WRITE_ROW = "update_train_step_metrics"


class Row(NamedTuple):
    """Metrics that Lightning passes to its loggers in one call.

    Attributes:
        kind: Whether the row belongs to a training step, a training epoch or an evaluation.
        metrics: Logged values.
        shown: Values logged with `prog_bar=True`.
    """

    kind: Literal["step", "epoch", "evaluation"]
    metrics: dict[str, float]
    shown: dict[str, float]


class RowTap:
    """Passes each row to a function, with or without loggers, from construction until `detach`.

    Args:
        trainer: Trainer whose rows are passed on.
        receive: Called with each row after the loggers have received it.
    """

    def __init__(self, trainer: Trainer, receive: Callable[[Row], None]) -> None:
        self._attributes = vars(trainer._logger_connector)
        self._receive = receive
        if _RECEIVERS not in self._attributes:
            self._attributes[_RECEIVERS] = []
            self._attributes["log_metrics"] = _tapped(trainer)
        self._attributes[_RECEIVERS].append(receive)

    def detach(self) -> None:
        """Stop receiving, and restore Lightning's method after the last tap; calling it twice is harmless."""
        receivers = self._attributes.get(_RECEIVERS, [])
        if self._receive in receivers:
            receivers.remove(self._receive)
        if not receivers:
            for name in (_RECEIVERS, "log_metrics"):
                self._attributes.pop(name, None)


_RECEIVERS = "recipes_receivers"


def _tapped(trainer: Trainer) -> Callable[..., None]:
    connector = trainer._logger_connector
    log_metrics = connector.log_metrics

    def tapped(metrics: Mapping[str, Any], step: int | None = None) -> None:
        log_metrics(dict(metrics), step)
        if trainer.sanity_checking or (step is not None and not trainer.training):
            return  # rows of single evaluation batches have their own x axis
        is_step = connector._first_loop_iter is not None
        kind: Literal["step", "epoch", "evaluation"] = "step" if is_step else "epoch"
        row = Row("evaluation" if not trainer.training else kind, as_floats(metrics), {})
        if connector.trainer._results is not None:
            row = row._replace(shown=as_floats(connector.metrics["pbar"]))
        for receive in [*vars(connector)[_RECEIVERS]]:
            receive(row)

    return tapped


def get_learning_rates(trainer: Trainer) -> dict[str, float]:
    """Return the rates of LearningRateMonitor, which it passes to the loggers itself, before the step."""
    return as_floats({name: value for name, value in trainer.callback_metrics.items() if name.startswith("lr-")})


def as_floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric metrics as floats; metrics may be tensors, nested dicts or text."""
    floats: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, dict):
            floats |= as_floats({f"{name}.{key}": nested for key, nested in value.items()})
        elif isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            floats[name] = float(value)
    return floats


def averages_weights_periodically(strategy: Any) -> bool:
    """Return whether the ranks of a DDP strategy train different weights between averagings (post-local SGD)."""
    return strategy._model_averaging_period is not None
