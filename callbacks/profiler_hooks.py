"""Call listeners when a named Trainer action starts and stops: one dictionary look-up per action.

Lightning has no hooks around fetching data or writing a checkpoint, but it reports both to its profiler, whichever one
is set. The tap intercepts these calls and passes them on.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.profilers import Profiler


def get_profiler(trainer: Trainer) -> Profiler:
    """Return the trainer's profiler; Lightning sets this attribute from outside the class."""
    untyped: Any = trainer
    profiler: Profiler = untyped.profiler
    return profiler


class Listener(NamedTuple):
    """Functions to call when an action starts and when it stops."""

    on_start: Callable[[], None]
    on_stop: Callable[[], None]


class ProfilerTap:
    """Calls listeners at the start and stop of profiler actions, from construction until `detach`.

    Args:
        listeners: Listeners by action name, as in `profiler.profile(name)`.
        profiler: The trainer's profiler, whose `start` and `stop` are replaced on the instance.
    """

    def __init__(self, listeners: Mapping[str, Listener], profiler: Profiler) -> None:
        start, stop = profiler.start, profiler.stop

        def tapped_start(action_name: str) -> None:
            start(action_name)
            if action_name in listeners:
                listeners[action_name].on_start()

        def tapped_stop(action_name: str) -> None:
            if action_name in listeners:
                listeners[action_name].on_stop()
            stop(action_name)

        # Set on the instance, where they shadow the class methods: its type and other methods are unchanged.
        vars(profiler).update(start=tapped_start, stop=tapped_stop)
        self._profiler: Profiler | None = profiler

    def detach(self) -> None:
        """Restore the profiler's own methods; calling it twice is harmless."""
        if self._profiler is not None:
            for name in ("start", "stop"):
                vars(self._profiler).pop(name)
            self._profiler = None
