"""One reward function in a process of its own, which `recipes.reward.workers` starts, asks and kills.

A request is a pickle: first the name and the function, then for each call its time limit and the lists. A reply is
one line of JSON: nothing but `{}` once the function is loaded, else `scores`, `raised` or `mistake`. A process that is
out of time or crashes writes where it was instead: faulthandler does, without Python's help.
"""

import contextlib
import faulthandler
import fcntl
import functools
import itertools
import json
import os
import pickle
import re
import select
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from recipes.errors import ConfigError
from recipes.reward import Reward, call, check_scores

OUT_OF_TIME = "Timeout ("  # how faulthandler begins
_MOST_CHARACTERS = 300  # of the message of an exception: it may quote a completion
_OWN_FOLDER = os.path.join("recipes", "reward")
_MAIN_THREAD = os.path.join(_OWN_FOLDER, 'worker.py"')
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in ', re.MULTILINE)
# a cluster sends them to all processes of a job, but the rank finishes its step, and needs the scores for it
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def main() -> None:
    """Load the function, then answer calls until the pipe of requests closes.

    `sys.argv[1:]` are the time limit of loading in seconds, and the pipes for requests, for replies and of `_end_with`.
    """
    load_seconds, pipes = float(sys.argv[1]), [int(number) for number in sys.argv[2:]]
    for pipe in pipes:
        os.set_inheritable(pipe, False)  # not for what the function starts
    _end_with(pipes[2])
    _outlive_signals()
    with os.fdopen(pipes[0], "rb") as requests, os.fdopen(pipes[1], "w") as replies, contextlib.suppress(EOFError):
        faulthandler.enable(file=replies, all_threads=False)
        function: Reward | None = None
        name, pickled = pickle.load(requests)
        with _reply(replies, load_seconds):
            loaded = pickle.loads(pickled)
            if hasattr(loaded, "load"):
                loaded.load()
            function = loaded
        while function is not None:
            seconds, given = pickle.load(requests)
            with _reply(replies, seconds) as reply:
                reply["scores"] = check_scores(name, call(function, given), len(given["completions"]))


def _end_with(life: int) -> None:
    """Have the kernel kill this process and all that it starts when the other end of a pipe closes: the rank is gone.

    No thread could: a function in C, such as a regular expression without end, does not let it run.
    """
    fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(life, fcntl.F_SETFL, os.O_ASYNC)
    if select.select([life], [], [], 0)[0]:
        sys.exit("the rank was gone before its reward function started")


def _outlive_signals() -> None:
    """Do nothing on the signals of a job; processes that the function starts have the handlers of any other."""
    # a handler, unlike SIG_IGN, is not inherited by other programs, which `terminate` has to end
    previous = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)
        unblock()

    # one that is sent to a new process before it has its handlers waits for them
    block = functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, _SIGNALS)
    unblock = functools.partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, _SIGNALS)
    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=restore)


@contextlib.contextmanager
def _reply(replies: TextIO, seconds: float) -> Iterator[dict[str, Any]]:
    """Write the reply that the body fills in, or what it raises; end this process if it takes too long."""
    reply: dict[str, Any] = {}
    faulthandler.dump_traceback_later(seconds, exit=True, file=replies)
    try:
        yield reply
    except ConfigError as error:
        reply["mistake"] = [error.setting, error.reason, error.fix]
    except Exception as error:
        what = f"{type(error).__name__}: {error}".partition("\n")[0][:_MOST_CHARACTERS]
        frames = [(frame.filename, frame.lineno) for frame in reversed(traceback.extract_tb(error.__traceback__))]
        reply["raised"] = f"{what}{_describe_line(frames)}"
    faulthandler.cancel_dump_traceback_later()
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def find_line(words: str) -> str:
    """Return ` in <file>, line <number>` of what faulthandler has written; empty if it has no line of Python."""
    threads = words.split("\n\n")
    of_main = next((thread for thread in threads if _MAIN_THREAD in thread), threads[0])
    return _describe_line((file, int(number)) for file, number in _FRAME.findall(of_main))


def _describe_line(frames: Iterable[tuple[str, int | None]]) -> str:
    """Return the place in the file of the function, not that in a library which it calls.

    Args:
        frames: File and line of each frame, newest first.
    """
    real = [frame for frame in frames if not frame[0].startswith("<")]  # not those of the import system
    theirs = [*itertools.takewhile(lambda frame: not os.path.dirname(frame[0]).endswith(_OWN_FOLDER), real)]
    found = next((frame for frame in theirs if frame[0] == theirs[-1][0]), next(iter(real), None))
    return "" if found is None else f" in {os.path.basename(found[0])}, line {found[1]}"
