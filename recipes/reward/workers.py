"""Rewards of a policy in training: each function in a process of its own, which may hang, raise or die.

The rank asks all functions at the same time and waits for none longer than a bound that it knows.
"""

import contextlib
import json
import logging
import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from recipes.errors import ConfigError
from recipes.reward import Reward, name_scores, reads_tokens, sum_weighted
from recipes.reward.model import RewardModel
from recipes.reward.worker import OUT_OF_TIME, find_line

LOGGER = logging.getLogger("lightning_recipes")
# sys.path as here, of which `-P` leaves out this folder
_COMMAND = "import sys; at = sys.argv.index('--'); sys.path[:] = sys.argv[at + 1 :]; del sys.argv[at:]"
_COMMAND += "; from recipes.reward.worker import main; main()"
_LOAD_LIMITS = 10.0  # time limits of a call: to import the libraries of a function, or to load its model
_GRACE_SECONDS = 1.0  # for a worker that is out of time to write where it was
_PIPE_BYTES = 1 << 16
_MOST_LOST = 8  # completions in a row that each cost a worker, after which the others are not tried: a group of samples


class Scores(NamedTuple):
    """What each completion has earned.

    Attributes:
        total: Weighted sum of all functions, one for each completion.
        of_functions: Scores by function, before its weight, one for each completion.
        num_errors: Completions by function that have the error score.
    """

    total: list[float]
    of_functions: dict[str, list[float]]
    num_errors: dict[str, int]


class _Failure(NamedTuple):
    """Why there are no scores.

    Attributes:
        what: What has happened, and where.
        lost: Whether the worker is gone.
        late: Whether it was out of time.
    """

    what: str
    lost: bool = False
    late: bool = False


class _Worker:
    """A process with one function, and the ends of its pipes."""

    def __init__(self, load_seconds: float, *, gpu: str) -> None:
        ends = [os.pipe() for _ in range(3)]
        (its_requests, self.requests), (self.replies, its_replies), (its_life, self._life) = ends
        its_ends = [its_requests, its_replies, its_life]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-c", _COMMAND, str(load_seconds), *map(str, its_ends), "--", *sys.path],
                env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu},
                stdin=subprocess.DEVNULL,
                stdout=2,  # with a log of the rank, whatever the function prints
                pass_fds=its_ends,
                process_group=0,  # Ctrl-C does not reach it, and whatever the function starts ends with it
            )
        finally:
            for end in its_ends:
                os.close(end)
        os.set_blocking(self.requests, False)

    def end(self, grace_seconds: float = 0.0) -> int:
        """Kill the process and all that it has started; return the exit status.

        Args:
            grace_seconds: How long it may still need to end by itself.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_seconds)
        with contextlib.suppress(ProcessLookupError):  # the group is empty
            os.killpg(self._process.pid, signal.SIGKILL)
        for end in (self.requests, self.replies, self._life):
            os.close(end)
        return self._process.wait()


_PROCESSES: dict[tuple[bytes, ...], dict[str, _Worker]] = {}  # functions, pickled -> their processes by name


class RewardWorkers:
    """Scores completions by several functions, each in a process of its own, and sums them by weight.

    The processes start at the first call: new interpreters in which nothing is executed but the functions. They see no
    GPU unless a function has `uses_gpu = True`, for that of the rank, or sets `CUDA_VISIBLE_DEVICES` before it imports
    torch, and what they print goes to the standard error of the rank. They end with the rank, however it ends.

    A function is called with all completions of the rank. If that call raises, takes too long or ends the process, each
    completion is tried alone, in a new process where the old one is gone: those that fail again get `error_score`. This
    second pass takes at most twice `timeout_seconds`: a completion has half of what is left of them, so that the first
    one that hangs costs `timeout_seconds`, the next one half of it, and all of them together no more than twice that.
    It leaves out the rest after 8 completions in a row that each cost a process. So a call takes at most
    `timeout_seconds`, and twice that more for each function that fails. Loading a function has a limit of its own, ten
    times `timeout_seconds`, and a second pass starts no more processes after as long.

    Args:
        functions: Rewards by name; None is left out.
        timeout_seconds: Time limit of a call with all completions of a rank.
        error_score: What a completion gets from a function that fails for it, before the weight.
        max_errors: Calls in a row in which a function works for no completion, after which the run stops. It stops at
            once if this is the first one.

    Raises:
        ConfigError: A function cannot be sent to another process.
    """

    def __init__(
        self,
        *,
        functions: Mapping[str, Reward | None],
        timeout_seconds: Annotated[float, "> 0, <= 86400"],
        error_score: Annotated[float, ">= -1000, <= 1000"],
        max_errors: Annotated[int, ">= 1"],
    ) -> None:
        self._functions = {name: function for name, function in functions.items() if function is not None}
        self._timeout_seconds, self._error_score, self._max_errors = timeout_seconds, error_score, max_errors
        self._pickled = {name: _pickle(name, function) for name, function in self._functions.items()}
        # training and validation of a run ask the same processes: a reward model is in memory once
        self._workers = _PROCESSES.setdefault(tuple(self._pickled.values()), {})
        self._has_worked: set[str] = set()
        self._has_warned: set[str] = set()
        self._num_failed_calls = dict.fromkeys(self._functions, 0)  # in a row
        # not at exit: the kernel ends them then, and a forked process that exits may not
        weakref.finalize(self, _end_all, self._workers).atexit = False

    @property
    def names(self) -> tuple[str, ...]:
        """The functions, in the order of the config."""
        return tuple(self._functions)

    @property
    def reads_tokens(self) -> bool:
        """Whether one of them reads tokens."""
        return any(map(reads_tokens, self._functions.values()))

    @property
    def models(self) -> dict[str, RewardModel]:
        """The reward models among them, by name."""
        functions: dict[str, Any] = {**self._functions}
        return {name: each for name, each in functions.items() if isinstance(each, RewardModel)}

    @property
    def num_functions(self) -> int:
        """Number of functions."""
        return len(self._functions)

    def __call__(
        self,
        *,
        prompts: Sequence[str],
        completions: Sequence[str],
        references: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        tokens: Sequence[Sequence[int]] | None = None,
    ) -> Scores:
        """Score each completion.

        Raises:
            ConfigError: A function works for no completion, in its first call or in `max_errors` calls in a row, or it
                returns something else than a finite number for each.
        """
        given: dict[str, Sequence[Any]] = {"prompts": prompts, "completions": completions, "references": references}
        given |= {"rows": rows} | ({"tokens": tokens} if tokens is not None and self.reads_tokens else {})
        num_errors = dict.fromkeys(self._functions, 0)
        if not completions:
            return Scores([], {name: [] for name in self._functions}, num_errors)
        scores = {}
        try:
            found = self._ask(self.names, given, self._timeout_seconds)
            for name, values in found.items():
                each = self._score_one_by_one(name, given, values) if isinstance(values, _Failure) else values
                failures = [one for one in each if isinstance(one, _Failure)]
                self._count(name, failures, len(each))
                if isinstance(values, _Failure):
                    self._warn(name, values, len(failures), len(each))
                num_errors[name] = len(failures)
                scores[name] = [self._error_score if isinstance(one, _Failure) else one for one in each]
        except BaseException:  # a worker may still be busy: its answer is not that to the next call
            self.close()
            raise
        return Scores(sum_weighted(self._functions, scores, len(completions)), scores, num_errors)

    def close(self) -> None:
        """End all processes; another call starts new ones."""
        _end_all(self._workers)

    def _ask(
        self, names: Sequence[str], given: Mapping[str, Sequence[Any]], seconds: float
    ) -> dict[str, list[float] | _Failure]:
        """Return what each function says, all at the same time."""
        found: dict[str, list[float] | _Failure] = dict(self._load(names))
        request = pickle.dumps((seconds, given))
        asked = {name: request for name in names if name not in found}
        for name, reply in self._exchange(asked, seconds).items():
            if isinstance(reply, _Failure):
                found[name] = reply
            elif "mistake" in reply:
                raise ConfigError(*reply["mistake"])
            else:
                found[name] = reply["scores"] if "scores" in reply else _Failure(reply["raised"])
        return {name: found[name] for name in names}

    def _load(self, names: Sequence[str]) -> dict[str, _Failure]:
        """Start the functions that have no worker; return those that could not be loaded again.

        Raises:
            ConfigError: A function could not be loaded, and has never been.
        """
        new = [name for name in names if name not in self._workers]
        seconds = _LOAD_LIMITS * self._timeout_seconds
        for name in new:
            # no surprise in the memory of the rank's GPU: a function that wants it says so, or chooses another
            uses_gpu = getattr(self._functions[name], "uses_gpu", False)
            self._workers[name] = _Worker(seconds, gpu=_find_gpu() if uses_gpu else "")
        failures = {}
        for name, reply in self._exchange({name: self._pickled[name] for name in new}, seconds).items():
            if isinstance(reply, _Failure):
                failures[name] = reply
            elif reply:
                self._workers.pop(name).end()
                if "mistake" in reply and name not in self._has_worked:
                    raise ConfigError(*reply["mistake"])
                failures[name] = _Failure(reply["mistake"][1] if "mistake" in reply else reply["raised"], lost=True)
        for name, failure in failures.items():
            if name not in self._has_worked:
                raise self._describe(name, "it cannot be loaded", failure)
        return failures

    def _exchange(self, requests: Mapping[str, bytes], seconds: float) -> dict[str, dict[str, Any] | _Failure]:
        """Send requests to workers and return their replies; end those that do not reply in time."""
        end = time.monotonic() + seconds + _GRACE_SECONDS
        left, replies, waiting = dict(requests), dict.fromkeys(requests, b""), set(requests)
        with selectors.DefaultSelector() as selector:
            for name in requests:
                selector.register(self._workers[name].requests, selectors.EVENT_WRITE, name)
                selector.register(self._workers[name].replies, selectors.EVENT_READ, name)
            while waiting and (ready := selector.select(max(0.0, end - time.monotonic()))):
                for key, event in ready:
                    name = key.data
                    if event == selectors.EVENT_READ:
                        part = os.read(key.fd, _PIPE_BYTES)
                        replies[name] += part
                        is_done = not part or _is_whole(replies[name])
                    else:
                        left[name] = left[name][_write(key.fd, left[name]) :]
                        is_done = not left[name]
                    if is_done:
                        selector.unregister(key.fd)
                        waiting -= {name} if event == selectors.EVENT_READ else set()
        return {
            name: json.loads(reply) if _is_whole(reply) else self._end(name, reply, seconds, late=name in waiting)
            for name, reply in replies.items()
        }

    def _end(self, name: str, words: bytes, seconds: float, *, late: bool) -> _Failure:
        """End a worker that is out of time or dying, and return why."""
        worker = self._workers.pop(name)
        text = words.decode(errors="replace")
        late = late or text.startswith(OUT_OF_TIME)
        status = worker.end(0.0 if late else _GRACE_SECONDS)
        if late:
            what = f"it takes longer than {seconds:.3g} s"
        else:
            by = f"signal {-status}, {signal.strsignal(-status)}" if status < 0 else f"exit code {status}"
            what = f"its process ended by {by}"
        return _Failure(f"{what}{find_line(text)}", lost=True, late=late)

    def _score_one_by_one(
        self, name: str, given: Mapping[str, Sequence[Any]], failure: _Failure
    ) -> list[float | _Failure]:
        """Score each completion alone, so that one that a function cannot handle costs the others nothing."""
        count = len(given["completions"])
        scores: list[float | _Failure] = []
        left, load_left, num_lost = 2 * self._timeout_seconds, _LOAD_LIMITS * self._timeout_seconds, 0
        while len(scores) < count > 1 and left > 0 and load_left > 0 and num_lost < _MOST_LOST:
            one = {key: values[len(scores) : len(scores) + 1] for key, values in given.items()}
            start = time.monotonic()
            not_loaded = self._load([name])
            loaded = time.monotonic()
            found = not_loaded[name] if not_loaded else self._ask([name], one, left / 2)[name]
            left, load_left = left - (time.monotonic() - loaded), load_left - (loaded - start)
            num_lost = num_lost + 1 if isinstance(found, _Failure) and found.lost else 0
            scores += [found] if isinstance(found, _Failure) else found
        return scores + [failure] * (count - len(scores))

    def _count(self, name: str, failures: Sequence[_Failure], count: int) -> None:
        """Count calls in a row in which a function works for no completion.

        Raises:
            ConfigError: There are too many.
        """
        if len(failures) < count:
            self._has_worked.add(name)
            self._num_failed_calls[name] = 0
        else:
            self._num_failed_calls[name] += 1
            if name not in self._has_worked:
                raise self._describe(name, "it works for no completion", failures[0])
            if self._num_failed_calls[name] >= self._max_errors:
                in_a_row = f"in {self._max_errors} calls in a row it worked for no completion"
                raise self._describe(name, in_a_row, failures[0])

    def _warn(self, name: str, failure: _Failure, num_failures: int, count: int) -> None:
        if name not in self._has_warned:
            self._has_warned.add(name)
            LOGGER.warning(
                "reward.%s: %s; called for each completion alone, %d of %d get the error score %g; not logged again",
                *(name, failure.what, num_failures, count, self._error_score),
            )

    def _describe(self, name: str, what: str, failure: _Failure) -> ConfigError:
        fix = "the same command once it is corrected"
        if failure.late:
            fix = f"task.rewards.timeout_seconds={2 * self._timeout_seconds:g}, or {fix}"
        return ConfigError(f"reward.{name}", f"{what}: {failure.what}", fix)


class RewardsInProcesses:
    """What `recipes.reward.Rewards` is, for `callbacks.generation_eval` of a run that no function may hang or end.

    Args:
        functions: Rewards by name; None is left out.
        timeout_seconds: Time limit of a call with all answers.
        error_score: What an answer gets from a function that fails for it, before the weight.
        max_errors: Calls in a row in which a function works for no answer, after which the run stops.

    Raises:
        ConfigError: A function cannot be sent to another process.
    """

    def __init__(
        self,
        *,
        functions: Mapping[str, Reward | None],
        timeout_seconds: Annotated[float, "> 0, <= 86400"],
        error_score: Annotated[float, ">= -1000, <= 1000"],
        max_errors: Annotated[int, ">= 1"],
    ) -> None:
        self._workers = RewardWorkers(
            functions=functions, timeout_seconds=timeout_seconds, error_score=error_score, max_errors=max_errors
        )
        self.reads_tokens = self._workers.reads_tokens

    def __call__(
        self,
        *,
        prompts: Sequence[str],
        completions: Sequence[str],
        references: Sequence[str],
        rows: Sequence[Mapping[str, Any]],
        tokens: Sequence[Sequence[int]] | None = None,
    ) -> dict[str, list[float]]:
        """Return the scores of each answer by name, as `Rewards` does.

        Raises:
            ConfigError: As `RewardWorkers` does.
        """
        if not self._workers.num_functions:
            return {}
        scores = self._workers(
            prompts=prompts, completions=completions, references=references, rows=rows, tokens=tokens
        )
        return name_scores(scores.total, scores.of_functions)


def _pickle(name: str, function: Reward) -> bytes:
    """Return the first request to a worker.

    Raises:
        ConfigError: The function cannot be sent to another process.
    """
    try:
        return pickle.dumps((name, pickle.dumps(function)))
    except Exception as error:  # of any method of a class of the user's
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        reason = f"it cannot be sent to the process that it runs in: {what}"
        fix = "the same command once its `load()` makes what cannot be pickled, instead of `__init__`"
        raise ConfigError(f"reward.{name}", reason, fix) from error


def _find_gpu() -> str:
    """Return the GPU that this rank computes on, as `CUDA_VISIBLE_DEVICES` names it; empty of a rank without one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def _is_whole(reply: bytes) -> bool:
    return reply.startswith(b"{") and reply.endswith(b"\n")


def _write(pipe: int, data: bytes) -> int:
    """Return how many bytes a pipe takes at once; all if nobody reads it: the pipe of replies ends, too."""
    try:
        return os.write(pipe, data)
    except BrokenPipeError:
        return len(data)


def _end_all(workers: dict[str, _Worker]) -> None:
    while workers:
        workers.popitem()[1].end()
