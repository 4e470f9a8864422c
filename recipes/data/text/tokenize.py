"""Text -> token ids over processes, in order and in bounded memory: ~3 MB/s per core with BPE.

A worker imports only numpy and `tokenizers`, and dies with the process that started it.
"""

import contextlib
import logging
import multiprocessing
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.data.text.corpus import Corpus, Piece
from recipes.runtime.world import num_cores
from recipes.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Tokens = NDArray[np.unsignedinteger]
Task = list[Piece]

# with less text per process, starting it (~0.3 s) does not pay off
_MIN_BYTES_PER_PROCESS = 2 * 1024**2
_MIN_BYTES_PER_PROCESS_OF_BYTES = 256 * 1024**2  # bytes are copied, not searched
_TASK_BYTES = 1024 * 1024
_TASKS_PER_PROCESS = 2  # one running, one queued: this bounds the memory

_worker_tokenizer: Tokenizer | None = None  # set once in each worker process


def tokenize(
    corpus: Corpus, tokenizer: Tokenizer, *, dtype: str, num_processes: int | None = None
) -> Iterator[tuple[Piece, Tokens]]:
    """Yield every piece of the corpus and its tokens, in the order of the corpus.

    Args:
        corpus: Documents to read.
        tokenizer: Encodes them. Documents stay uncut if their parts would get other ids.
        dtype: Of the arrays, "uint16" or "uint32".
        num_processes: Largest number of processes, fewer if the text is short; None: one per core.

    Yields:
        Pieces, each with its tokens, [number of tokens].

    Raises:
        ConfigError: Text is not UTF-8; raised in this process, whichever found it.
    """
    tasks = _group(corpus.pieces(cut=tokenizer.splits_at_lines))
    workers = num_workers(corpus.num_bytes, tokenizer, num_processes=num_processes)
    with _progress(corpus.num_bytes) as advance:
        results = (
            ((task, [_encode(piece, tokenizer, dtype) for piece in task]) for task in tasks)
            if workers == 1
            else _in_parallel(tasks, tokenizer, dtype=dtype, workers=workers)
        )
        for task, arrays in results:
            yield from zip(task, arrays, strict=True)
            advance(sum(piece.stop - piece.start for piece in task))


def num_workers(num_bytes: int, tokenizer: Tokenizer, *, num_processes: int | None) -> int:
    """Return the number of processes that pay off; 1 means the current process."""
    if multiprocessing.current_process().daemon:
        return 1  # a daemonic process may not have children
    per_process = _MIN_BYTES_PER_PROCESS_OF_BYTES if tokenizer.is_bytes else _MIN_BYTES_PER_PROCESS
    most = num_cores() if num_processes is None else num_processes
    return max(1, min(most, num_bytes // per_process))


def _group(pieces: Iterable[Piece]) -> Iterator[Task]:
    """Group pieces into tasks of about 1 MiB."""
    task: Task = []
    num_bytes = 0
    for piece in pieces:
        task.append(piece)
        num_bytes += piece.stop - piece.start
        if num_bytes >= _TASK_BYTES:
            yield task
            task, num_bytes = [], 0
    if task:
        yield task


def _encode(piece: Piece, tokenizer: Tokenizer, dtype: str) -> Tokens:
    return tokenizer.encode_array(piece.read()).astype(dtype)


def _in_parallel(
    tasks: Iterator[Task], tokenizer: Tokenizer, *, dtype: str, workers: int
) -> Iterator[tuple[Task, list[Tokens]]]:
    """Yield results in the order of the tasks, with a bounded number of them pending."""
    # spawn: a fork of a process with threads may hang
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(tokenizer,),
    )
    pending: deque[tuple[Task, Future[list[Tokens]]]] = deque()
    try:
        for task in tasks:
            pending.append((task, pool.submit(_encode_task, task, dtype)))
            if len(pending) >= workers * _TASKS_PER_PROCESS:
                oldest, future = pending.popleft()
                yield oldest, future.result()
        while pending:
            oldest, future = pending.popleft()
            yield oldest, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(tokenizer: Tokenizer) -> None:
    global _worker_tokenizer
    _worker_tokenizer = tokenizer
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Exit when the parent dies: a killed parent cannot stop its workers, and they would wait for tasks forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    parent.join()
    os._exit(1)


def _encode_task(task: Task, dtype: str) -> list[Tokens]:
    assert _worker_tokenizer is not None, "_start_worker runs first"
    return [_encode(piece, _worker_tokenizer, dtype) for piece in task]


@contextlib.contextmanager
def _progress(num_bytes: int) -> Iterator[Callable[[int], Any]]:
    """Show a progress bar on a terminal, or log one line; yield a function that advances it by bytes."""
    if not sys.stderr.isatty():
        log.info("tokenizing %.1f MB of text", num_bytes / 1e6)
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = ("tokenizing", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        row = bar.add_task("tokenizing", total=num_bytes)
        yield lambda advance: bar.advance(row, advance)
