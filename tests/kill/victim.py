"""One run that is killed and started again with the same command until it finishes."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kill.disk import Disk, began_at, events_size, last_row, read_disk, saves
from kill.lives import Life

_LIFE_SECONDS = 120.0
_POLL_SECONDS = 0.002
_POLL_IN_SAVE_SECONDS = 0.0005

StartLife = Callable[[Path], Life]


@dataclass(kw_only=True)
class Moment:
    """When to kill.

    Attributes:
        after: Event to wait for: `start` of the life, its first new `row`, or the beginning of a `save`.
        seconds: Delay after that event.
        saves_before: Number of saves to let complete first.
    """

    after: str
    seconds: float
    saves_before: int = 0


def draw_moment(rng: random.Random, after: str, *, start_seconds: float) -> Moment:
    """Draw a moment after an event. A save takes at least 5 ms: two of three kills come within 4 ms, the rest in 30."""
    if after == "start":
        return Moment(after=after, seconds=rng.uniform(0.0, start_seconds))
    if after == "row":
        return Moment(after=after, seconds=rng.uniform(0.0, 0.8))
    within = rng.choice((0.0, 0.004, 0.030))
    return Moment(after=after, seconds=rng.uniform(0.0, within), saves_before=rng.randrange(8))


@dataclass(kw_only=True)
class Death:
    """How one life ended by a kill.

    Attributes:
        after: The event of its `Moment`.
        seconds: From the start of the life to the end of its last process.
        in_save: Whether it left a folder of an unfinished checkpoint.
        row: Step of the last row on disk.
        newest: Step of the newest complete checkpoint; -1 without one.
        by_command: Whether the life was the real command.
    """

    after: str
    seconds: float
    in_save: bool
    row: int
    newest: int
    by_command: bool


@dataclass(kw_only=True)
class Victim:
    """A run folder and the lives it has had.

    Attributes:
        rng: Source of the moments.
        num_lives: Number of starts so far.
        deaths: The lives that were killed.
        recovery_seconds: Of each forked life but the first, from its start to the first row beyond those of earlier
            lives; None if it was killed before.
        command_seconds: The same for lives that were the real command.
        lost: Descriptions of checkpoints of earlier lives that were lost.
    """

    folder: Path
    rng: random.Random
    num_lives: int = 0
    deaths: list[Death] = field(default_factory=list)
    recovery_seconds: list[float | None] = field(default_factory=list)
    command_seconds: list[float | None] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    @property
    def log(self) -> Path:
        """Log file of the newest life, without suffix."""
        return self.folder.with_name(f"{self.folder.name}_life_{self.num_lives:03d}")

    def live(self, start: StartLife, moment: Moment | None, *, by_command: bool = False) -> bool:
        """Run one life, killed at a moment or never; return whether the run has finished.

        Raises:
            AssertionError: It failed by itself, or hangs.
        """
        self.num_lives += 1
        watch = _Watch(self.folder)
        life = start(self.log)
        try:
            due = watch.until(life, moment)
        except AssertionError:
            life.kill(self.rng)
            raise
        if self.num_lives > 1:
            seconds = self.command_seconds if by_command else self.recovery_seconds
            seconds.append(watch.recovery_seconds)
        killed = due and life.kill(self.rng)
        code = 0 if killed else life.wait()
        assert code == 0, f"it ended by itself, with exit code {code}"
        after = read_disk(self.folder)
        self.lost += watch.lost(after)
        if moment is None or not killed:
            return True
        self.deaths.append(
            Death(
                after=moment.after,
                seconds=time.monotonic() - watch.began,
                in_save=bool(saves(self.folder) - watch.saves),
                row=after.row,
                newest=after.newest,
                by_command=by_command,
            )
        )
        return False


class _Watch:
    """Watches a run folder from outside while a life writes to it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.before = read_disk(folder)
        self.saves = saves(folder)  # left by earlier lives
        self._events = events_size(folder)
        self._names: set[str] = set()  # of saves of this life
        self._first_step: int | None = None
        self.recovery_seconds: float | None = None
        self.began = time.monotonic()

    def until(self, life: Life, moment: Moment | None) -> bool:
        """Wait for the moment; return False if the life has ended by itself before."""
        due = None
        while True:
            now = time.monotonic()
            assert now - self.began < _LIFE_SECONDS, "it neither ends nor reaches the moment of its kill"
            self._time_recovery(now)
            if due is None and moment is not None and self._has_come(moment):
                due = (self.began if moment.after == "start" else now) + moment.seconds
            if due is not None and now >= due:
                return True
            if life.has_ended():
                return False
            in_save = moment is not None and moment.after == "save"
            pause = _POLL_IN_SAVE_SECONDS if in_save else _POLL_SECONDS
            time.sleep(pause if due is None else max(0.0, min(pause, due - now)))

    def _time_recovery(self, now: float) -> None:
        if self.recovery_seconds is None and last_row(self._folder) > self.before.row:
            self.recovery_seconds = now - self.began

    def _has_come(self, moment: Moment) -> bool:
        if moment.after == "start":
            return True
        if moment.after == "row":
            if self._first_step is None:
                self._first_step = began_at(self._folder, self._events)
            return self._first_step is not None and last_row(self._folder) > self._first_step
        self._names |= {name for name, _ in saves(self._folder) - self.saves}
        return len(self._names) > moment.saves_before

    def lost(self, after: Disk) -> Iterator[str]:
        """Yield what was lost, judged after the life: the checkpoints before and after it, and where it resumed."""
        newest = self.before.newest
        if after.newest < newest:
            yield f"the newest complete checkpoint was of step {newest} and is of {after.newest}"
        if after.last is False:
            yield "checkpoints/last leads to no complete checkpoint"
        began = began_at(self._folder, self._events)
        if began is not None and began < newest:
            yield f"it resumed from step {began} although there was a complete checkpoint of step {newest}"
