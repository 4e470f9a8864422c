"""Make all ranks act after the same optimizer step, whichever rank requests it, at no cost per training step.

A thread on each rank polls the ranks' store four times a second. Only after a request do the threads exchange each
rank's progress, and a rank that completes its step in the meantime waits for the result.
"""

import math
import threading
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from recipes.runtime.host_group import connect_hosts

_POLL_SECONDS = 0.25
_CLOSE_SECONDS = 2.0  # join timeout: an exchange that a peer never joins would block
# a step and the index of the check within its validation: with sharded weights, validation batches also run
# collectives, so all ranks must leave a validation after the same batch
_Point = tuple[int, float]


class StepAgreement:
    """Requests by name, each due at a step that no rank has completed yet.

    Args:
        step: Optimizer steps completed when training begins. Constructing it is a collective.
    """

    def __init__(self, *, step: int) -> None:
        self._checked: _Point = (step, math.inf)  # the newest point at which this rank has checked
        self._requests: set[str] = set()  # of this rank, not yet exchanged
        self._due: dict[str, _Point] = {}  # request -> due at the first point after this one
        self._agreed: dict[str, _Point] = {}  # like `_due`, but kept once the request is done; equal on all ranks
        self._is_exchanging = False
        self._changed = threading.Condition()  # guards `_checked`, `_due` and `_is_exchanging`
        self._closed = threading.Event()
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        if not self._alone:
            # a group of its own: its collectives run in another thread than those of training
            self._group = connect_hosts()
            name = f"step_agreement_{self._group.group_name}"
            self._store: Any = PrefixStore(name, _get_default_store())
            self._thread = threading.Thread(target=self._poll, name="agreement", daemon=True)
            self._thread.start()

    def ask(self, what: str) -> None:
        """Request an action on all ranks as soon as possible. Safe to call from a signal handler."""
        # no lock here: the handler may have interrupted the thread that holds it
        self._requests.add(what)

    def take_due(self, step: int, *, in_validation: bool = False, wait: bool = True) -> set[str]:
        """Return the actions due now that a step is completed.

        Args:
            step: Optimizer steps completed.
            in_validation: Whether this rank is in a validation, so that the step does not advance.
            wait: Whether to wait for a running exchange; False after the last step, when nothing is left to agree on.
        """
        if self._alone:
            due, self._requests = self._requests, set()
            return due
        with self._changed:
            last_step, num_checks = self._checked
            point = (step, (num_checks + 1 if last_step == step else 0) if in_validation else math.inf)
            # a rank that continued during an exchange could pass the point being agreed on
            while wait and self._is_exchanging:
                self._changed.wait()
            due = {what for what, after in self._due.items() if after < point}
            self._due = {what: after for what, after in self._due.items() if what not in due}
            self._checked = point
        return due

    def close(self) -> None:
        """Stop polling, so that the thread is gone before the interpreter is finalized."""
        self._closed.set()
        if not self._alone:
            self._thread.join(_CLOSE_SECONDS)

    def _poll(self) -> None:
        num_exchanges = 0
        while not self._closed.wait(_POLL_SECONDS):
            key = f"exchange_{num_exchanges}"
            try:
                if self._requests:
                    self._store.set(key, "requested")
                if self._store.check([key]):
                    self._exchange()
                    num_exchanges += 1
            except RuntimeError:  # the ranks are exiting, and their store with them
                with self._changed:
                    self._is_exchanging = False
                    self._changed.notify_all()
                return

    def _exchange(self) -> None:
        """Gather the last check of every rank; requests are due after the latest of these points."""
        with self._changed:
            self._is_exchanging, checked = True, self._checked
            requests = set(self._requests)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (checked, sorted(requests)), group=self._group)
        with self._changed:
            self._agree(gathered)
            self._requests -= requests
            self._is_exchanging = False
            self._changed.notify_all()

    def _agree(self, gathered: Sequence[tuple[_Point, Sequence[str]]]) -> None:
        """Decide when the requests of all ranks are due, from gathered data only, so that all ranks agree.

        A repeated request before the agreed point is the same request. A rank that has passed the point with nothing
        left due must treat it the same way; otherwise it would act a second time, alone.
        """
        earliest, latest = (pick(point for point, _ in gathered) for pick in (min, max))
        for what in {what for _, names in gathered for what in names}:
            is_pending_somewhere = what in self._agreed and earliest <= self._agreed[what]
            if not is_pending_somewhere:
                self._agreed[what] = self._due[what] = latest
