"""Tokenize text in parallel processes, in order and in bounded memory: ~3 MB/s per core with BPE.

Workers import only numpy and `tokenizers`.
"""

import contextlib
import functools
import logging
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.data.parallel import group_by_bytes, map_in_order
from recipes.data.text.token_corpus import TextPiece, TokenCorpus
from recipes.runtime.world import num_cores
from recipes.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Tokens = NDArray[np.unsignedinteger]

# with less text per process, starting it (~0.3 s) does not pay off
_MIN_BYTES_PER_PROCESS = 2 * 1024**2
_MIN_BYTES_PER_PROCESS_OF_BYTES = 256 * 1024**2  # bytes are copied, not searched
_TASK_BYTES = 1024 * 1024


def tokenize(
    corpus: TokenCorpus, tokenizer: Tokenizer, *, dtype: str, num_processes: int | None = None
) -> Iterator[tuple[TextPiece, Tokens]]:
    """Yield every piece of the corpus and its tokens, in the order of the corpus.

    Args:
        corpus: Documents to read.
        tokenizer: Tokenizer that encodes them. Documents stay uncut if cutting would change their ids.
        dtype: Dtype of the arrays, "uint16" or "uint32".
        num_processes: Maximum number of processes, fewer if the text is short; None: one per core.

    Yields:
        Pieces, each with its tokens, [number of tokens].

    Raises:
        ConfigError: Text is not UTF-8; always raised in the calling process.
    """
    tasks = group_by_bytes(corpus.pieces(cut=tokenizer.splits_at_lines), max_bytes=_TASK_BYTES)
    workers = num_workers(corpus.num_bytes, tokenizer, num_processes=num_processes)
    encode = functools.partial(_encode, tokenizer=tokenizer, dtype=dtype)
    with _progress(corpus.num_bytes) as advance:
        for task, arrays in map_in_order(encode, tasks, workers=workers):
            yield from zip(task, arrays, strict=True)
            advance(sum(piece.num_bytes for piece in task))


def num_workers(num_bytes: int, tokenizer: Tokenizer, *, num_processes: int | None) -> int:
    """Return the number of worker processes worth starting; 1 means the current process."""
    if multiprocessing.current_process().daemon:
        return 1  # a daemonic process may not have children
    per_process = _MIN_BYTES_PER_PROCESS_OF_BYTES if tokenizer.is_bytes else _MIN_BYTES_PER_PROCESS
    most = num_cores() if num_processes is None else num_processes
    return max(1, min(most, num_bytes // per_process))


def _encode(task: list[TextPiece], *, tokenizer: Tokenizer, dtype: str) -> list[Tokens]:
    return [tokenizer.encode_array(piece.read()).astype(dtype) for piece in task]


@contextlib.contextmanager
def _progress(num_bytes: int) -> Iterator[Callable[[int], Any]]:
    """Show a progress bar on a terminal, or log one line; yield a function that advances it by bytes."""
    if sys.stderr is None or not sys.stderr.isatty():  # None: closed by the shell
        log.info("tokenizing %.1f MB of text", num_bytes / 1e6)
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = ("tokenizing", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        row = bar.add_task("tokenizing", total=num_bytes)
        yield lambda advance: bar.advance(row, advance)
