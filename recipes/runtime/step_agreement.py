"""All ranks agree to do something after the same optimizer step, whichever rank asks. Costs a training step nothing.

A thread on each rank looks at the ranks' store four times a second; only where somebody has asked do the threads meet,
and a rank that is through with its step waits for that meeting.
"""

import math
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

_POLL_SECONDS = 0.25
_CLOSE_SECONDS = 2.0  # a meeting that a peer has missed never ends
_NEVER = timedelta(days=1)
# a step and, in its validation, the how manieth look: batches hold collectives too where weights are sharded
_Point = tuple[int, float]


class StepAgreement:
    """Requests by name; each is due at a step that no rank has passed.

    Args:
        step: Optimizer steps completed when training begins. Every rank constructs one at the same time: a collective.
    """

    def __init__(self, *, step: int) -> None:
        self._passed: _Point = (step, math.inf)  # the newest point at which this rank has looked
        self._asked: set[str] = set()
        self._due: dict[str, _Point] = {}  # to be done at the first point after
        self._meets = False
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        if not self._alone:
            self._group = dist.new_group(backend="gloo", timeout=_NEVER)
            name = f"step_agreement_{self._group.group_name}"
            self._store: Any = PrefixStore(name, _get_default_store())
            self._thread = threading.Thread(target=self._listen, name="agreement", daemon=True)
            self._thread.start()

    def ask(self, what: str) -> None:
        """Ask all ranks for it as soon as they can. May be called by a signal handler."""
        self._asked.add(what)

    def due(self, step: int, *, resting: bool = False, wait: bool = True) -> set[str]:
        """What is to be done now that a step is completed.

        Args:
            step: The step.
            resting: Whether this rank stays at this step for a while, as all others will: a validation.
            wait: Whether to wait for a meeting under way; False after the last step, when there is nothing to agree on.
        """
        if self._alone:
            due, self._asked = self._asked, set()
            return due
        with self._changed:
            before, look = self._passed
            point = (step, (look + 1 if before == step else 0) if resting else math.inf)
            while wait and self._meets:
                self._changed.wait()
            due = {what for what, after in self._due.items() if after < point}
            self._due = {what: after for what, after in self._due.items() if what not in due}
            self._passed = point
        return due

    def close(self) -> None:
        """Stop listening. The thread is gone before the interpreter is taken down under it."""
        self._closed.set()
        if not self._alone:
            self._thread.join(_CLOSE_SECONDS)

    def _listen(self) -> None:
        meeting = 0
        while not self._closed.wait(_POLL_SECONDS):
            key = f"meeting_{meeting}"
            try:
                if self._asked:
                    self._store.set(key, "asked")
                if self._store.check([key]):
                    self._meet()
                    meeting += 1
            except RuntimeError:  # the ranks are coming to their end, and with them their store
                with self._changed:
                    self._meets = False
                    self._changed.notify_all()
                return

    def _meet(self) -> None:
        """Every rank says where it has looked last; what is asked for is due after the latest of these points."""
        with self._changed:
            self._meets, passed = True, self._passed
            asked = set(self._asked)
        met: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(met, (passed, sorted(asked)), group=self._group)
        latest = max(at for at, _ in met)
        with self._changed:
            for what in {what for _, whats in met for what in whats}:
                self._due[what] = min(latest, self._due.get(what, latest))  # asked for twice: once
            self._asked -= asked
            self._meets = False
            self._changed.notify_all()
