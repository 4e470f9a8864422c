"""Hears when a named action of the Trainer begins and ends: a dictionary look-up per action.

Lightning has no hook around a fetch of data or the writing of a checkpoint, but it tells its
profiler, whichever one is set, about both. The tap listens in on it and passes everything on.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.profilers import Profiler


def get_profiler(trainer: Trainer) -> Profiler:
    """The trainer's profiler, which Lightning sets from outside the class."""
    return trainer.profiler  # type: ignore[attr-defined, no-any-return]


class Listener(NamedTuple):
    on_start: Callable[[], None]
    on_stop: Callable[[], None]


class ProfilerTap:
    """Calls the listener of an action around it, from its making to `detach`."""

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

        # On the instance, where they shadow the class: its type and other methods stay as they are.
        vars(profiler).update(start=tapped_start, stop=tapped_stop)
        self._profiler: Profiler | None = profiler

    def detach(self) -> None:
        """Give the profiler its own methods back; harmless the second time."""
        if self._profiler is not None:
            for name in ("start", "stop"):
                vars(self._profiler).pop(name)
            self._profiler = None
