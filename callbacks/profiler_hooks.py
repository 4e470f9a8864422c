"""Listen to when a named action of the Trainer starts and stops: one dictionary look-up per action.

Lightning has no hook around fetching data or writing a checkpoint, but it reports both to its profiler, whichever is
set. The tap intercepts these calls and passes them on.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.profilers import Profiler


def get_profiler(trainer: Trainer) -> Profiler:
    """Return the trainer's profiler, an attribute that Lightning sets from outside the class."""
    return trainer.profiler  # type: ignore[attr-defined, no-any-return]


class Listener(NamedTuple):
    """What to call when an action starts and when it stops."""

    on_start: Callable[[], None]
    on_stop: Callable[[], None]


class ProfilerTap:
    """Calls the listener of an action around it, from construction until `detach`.

    Args:
        listeners: By name of the action, as `profiler.profile(name)` has it.
        profiler: The trainer's; its `start` and `stop` are replaced on the instance.
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

        # Set on the instance, where they shadow the class: its type and its other methods stay as they are.
        vars(profiler).update(start=tapped_start, stop=tapped_stop)
        self._profiler: Profiler | None = profiler

    def detach(self) -> None:
        """Restore the profiler's own methods; calling it twice is harmless."""
        if self._profiler is not None:
            for name in ("start", "stop"):
                vars(self._profiler).pop(name)
            self._profiler = None
