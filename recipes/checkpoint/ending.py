"""Why a run ended, as its last checkpoint records it: it stays finished until the setting that ended it changes.

Final are `trainer.max_steps` or `trainer.max_epochs`, `trainer.max_time` and a callback that stopped the run, such as
`callbacks.early_stop`. A signal is not: the same command continues.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import lightning.pytorch as lightning
from lightning.pytorch.callbacks import Callback, Timer

from recipes.lightning_internals import get_callbacks, is_ending

MAX_STEPS, MAX_EPOCHS, MAX_TIME = "trainer.max_steps", "trainer.max_epochs", "trainer.max_time"
CALLBACKS = "callbacks"
_OWN_PACKAGES = ("callbacks", "lightning_recipes")  # in this folder and installed


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Why a run ended.

    Attributes:
        by: What ended it: a setting, or the name of a signal.
        why: The reason in words.
        settings: Settings under which it stays ended, by key; empty if the same command continues.
    """

    by: str
    why: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def as_fields(self) -> dict[str, Any]:
        """Return plain values for a manifest."""
        return asdict(self)


class Endings:
    """Finds out what ends a run, and whether it still would.

    Args:
        settings: All settings that can end a run, with plain values: `trainer.max_steps`, as text in epochs of its
            loaders, such as "3epochs"; `trainer.max_time`, and each `callbacks.<name>`.
        callbacks: The callbacks by the same keys. One that ends a run may say why in an attribute `stopped_because`.
    """

    def __init__(self, settings: Mapping[str, Any], callbacks: Mapping[str, Callback]) -> None:
        self._settings = settings
        self._callbacks = callbacks

    def find(self, trainer: lightning.Trainer) -> Ending | None:
        """Return why the run ends after the current step; None if it goes on."""
        step = trainer.global_step
        if trainer.max_steps >= 0 and step >= trainer.max_steps:
            ending = self._by(MAX_STEPS, f"step {step} of {trainer.max_steps}")
            is_in_epochs = isinstance(self._settings.get(MAX_STEPS), str)
            return replace(ending, by=MAX_EPOCHS) if is_in_epochs else ending
        if not is_ending(trainer):
            return None
        for key, callback in self._callbacks.items():
            if (why := getattr(callback, "stopped_because", None)) is not None:
                return self._by(key, why)
        if (limit := self._find_time_limit(trainer)) is not None:
            return self._by(*limit)
        return Ending(by=CALLBACKS, why="a callback stopped it", settings=self._get_stoppers())

    def holds(self, ended: Mapping[str, Any] | None) -> bool:
        """Return whether the recorded ending is final, and no changed setting leaves the run more to do."""
        settings = (ended or {}).get("settings", {})
        if ended is not None and ended["by"] == CALLBACKS and set(settings) != set(self._get_stoppers()):
            return False
        return bool(settings) and all(self._is_no_more(key, value) for key, value in settings.items())

    def _get_stoppers(self) -> dict[str, Any]:
        """Return the settings of callbacks that may stop a run without saying why: none of this project's does."""
        return {
            key: self._settings.get(key)
            for key, callback in self._callbacks.items()
            if type(callback).__module__.partition(".")[0] not in _OWN_PACKAGES
        }

    def _is_no_more(self, key: str, then: Any) -> bool:
        now = self._settings.get(key)
        if key == MAX_TIME and now is not None:
            return (Timer(now).time_remaining() or 0) <= (Timer(then).time_remaining() or 0)
        return bool(now == then)

    def _by(self, key: str, why: str) -> Ending:
        return Ending(by=key, why=why, settings={key: self._settings.get(key)})

    def _find_time_limit(self, trainer: lightning.Trainer) -> tuple[str, str] | None:
        for callback in get_callbacks(trainer):
            if isinstance(callback, Timer) and (left := callback.time_remaining()) is not None and left <= 0:
                keys = [key for key, own in self._callbacks.items() if own is callback]
                return (*keys, MAX_TIME)[0], "the time limit was reached"
        return None


def describe_ending(ended: Mapping[str, Any]) -> str:
    """Return the reason and how to go on, for the log."""
    by = str(ended["by"])
    fix = {key: f"a larger {key}" for key in (MAX_STEPS, MAX_EPOCHS, MAX_TIME)} | {CALLBACKS: "other callbacks"}
    return f"{ended['why']} ({by}); to go on: {fix.get(by, f'another setting of {by}, or ~{by}')}"
