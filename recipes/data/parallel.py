"""Ordered parallel map over processes with bounded memory.

Workers exit when their parent process dies.
"""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, Protocol, TypeVar


class Sized(Protocol):
    """An object with an approximate size in bytes."""

    @property
    def num_bytes(self) -> int: ...


Item = TypeVar("Item", bound=Sized)
Task = TypeVar("Task")
Result = TypeVar("Result")

_TASKS_PER_PROCESS = 2  # one running, one queued: this bounds the memory

_function: Callable[[Any], Any] | None = None  # set once in each worker process


def map_in_order(
    function: Callable[[Task], Result], tasks: Iterable[Task], *, workers: int
) -> Iterator[tuple[Task, Result]]:
    """Yield each task and its result, in the order of the tasks, with a bounded number of pending tasks.

    Args:
        function: Picklable function; sent to each worker once.
        tasks: Picklable tasks.
        workers: Number of processes; 1: this one.
    """
    if workers == 1:
        for task in tasks:
            yield task, function(task)
        return
    # spawn: forking a process with threads may hang
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(function,),
    )
    pending: deque[tuple[Task, Future[Result]]] = deque()
    try:
        for task in tasks:
            pending.append((task, pool.submit(_call, task)))
            if len(pending) >= workers * _TASKS_PER_PROCESS:
                oldest, future = pending.popleft()
                yield oldest, future.result()
        while pending:
            oldest, future = pending.popleft()
            yield oldest, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def group_by_bytes(items: Iterable[Item], *, max_bytes: int, max_items: int | None = None) -> Iterator[list[Item]]:
    """Group consecutive items into tasks of about `max_bytes`; boundaries depend only on the items.

    Args:
        items: Items to group.
        max_bytes: Size at which a task is complete.
        max_items: Maximum number of items in a task; None: unlimited.
    """
    task: list[Item] = []
    num_bytes = 0
    for item in items:
        task.append(item)
        num_bytes += item.num_bytes
        if num_bytes >= max_bytes or len(task) == max_items:
            yield task
            task, num_bytes = [], 0
    if task:
        yield task


def _start_worker(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Exit when the parent dies: a killed parent cannot stop its workers, and they would wait for tasks forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    parent.join()
    os._exit(1)


def _call(task: Any) -> Any:
    assert _function is not None, "_start_worker runs first"
    return _function(task)
