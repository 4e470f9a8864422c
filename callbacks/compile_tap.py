"""Stops a watch while torch.compile compiles, whenever it does: nothing where nothing is compiled."""

from typing import Any

from torch._dynamo.callback import callback_handler

from callbacks.stopwatch import Stopwatch


class CompileTap:
    """Attached from its making to `detach`. torch tells of one compilation inside another only once."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._is_attached = True
        callback_handler.register_start_callback(self._on_start)
        callback_handler.register_end_callback(self._on_end)

    def _on_start(self, told: Any) -> None:
        self._watch.pause("compile")

    def _on_end(self, told: Any) -> None:
        self._watch.resume("compile")

    def detach(self) -> None:
        """Hear nothing more; harmless the second time."""
        if self._is_attached:
            callback_handler.remove_start_callback(self._on_start)
            callback_handler.remove_end_callback(self._on_end)
            self._is_attached = False
