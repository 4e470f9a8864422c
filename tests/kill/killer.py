"""Kills the runs of a case at moments that a seed draws, and compares each with one that was never killed."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from kill.cases import compose, words_of
from kill.disk import differences
from kill.lives import CommandLife, ForkedLife, Life, Zygote
from kill.victim import Victim, draw_moment
from support import write_texts

from recipes.config.compose import Composed

# in which a life of the zygote has come to its first row
START_SECONDS = 1.0
AFTER = ("start", "row", "save")


@dataclass(kw_only=True)
class Result:
    """What came of the kills of one case.

    Attributes:
        lost: Whole checkpoints that were gone or passed over after a kill, in words.
        broken: What differs from the run never killed, and lives that ended badly, in words.
    """

    name: str
    seed: int
    victims: list[Victim] = field(default_factory=list)
    num_finished: int = 0
    lost: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_kills(self) -> int:
        return sum(len(victim.deaths) for victim in self.victims)

    @property
    def num_kills_in_saves(self) -> int:
        return sum(death.in_save for victim in self.victims for death in victim.deaths)

    @property
    def recovery_seconds(self) -> list[float]:
        """Of lives that the zygote started, as far as they came."""
        found = [seconds for victim in self.victims for seconds in victim.recovery_seconds]
        return [seconds for seconds in found if seconds is not None]


class Killer:
    """Carries out the kills of a case.

    Args:
        workplace: Where run folders and logs go.
        zygote: Forks the ranks.
    """

    def __init__(self, workplace: Path, zygote: Zygote, *, seed: int) -> None:
        self._workplace = workplace
        self._texts = write_texts(workplace / "texts")
        self._zygote = zygote
        self._seed = seed
        self._composed: dict[str, Composed] = {}

    def kill(self, name: str, num_kills: int, *, num_by_command: int) -> Result:
        """Kill so many times, some of them the real command, and compare every victim with the reference."""
        began = time.monotonic()
        draw = random.Random(f"{self._seed}/{name}")
        place = self._workplace / name.replace(" ", "_")
        result = Result(name=name, seed=self._seed)
        reference = Victim(folder=place / "reference", draw=draw)
        reference.folder.mkdir(parents=True)
        self._live(result, reference, name)
        by_command = set(draw.sample(range(num_kills), num_by_command))
        while not result.broken and (result.num_kills < num_kills or not result.victims):
            victim = Victim(folder=place / f"victim_{len(result.victims)}", draw=draw)
            victim.folder.mkdir()
            result.victims.append(victim)
            while not result.broken:
                number = result.num_kills
                after = AFTER[number % 3] if number < num_kills else None
                if self._live(result, victim, name, after, by_command=number in by_command):
                    self._compare(result, victim, reference)
                    break
        result.seconds = time.monotonic() - began
        return result

    def _live(
        self,
        result: Result,
        victim: Victim,
        name: str,
        after: str | None = None,
        *,
        by_command: bool = False,
    ) -> bool:
        """One life, killed after what `after` says; whether the run has come to its end."""
        moment = None
        if after is not None:
            # the command imports for seconds first: its kill comes once it trains
            kind = "row" if by_command and after == "start" else after
            moment = draw_moment(victim.draw, kind, start_seconds=START_SECONDS)
        try:
            start = self._starter(name, victim.folder, by_command=by_command)
            ended = victim.live(start, moment, by_command=by_command)
        except AssertionError as error:
            self._note(result, victim, str(error))
            return False
        finally:
            lost, victim.lost = victim.lost, []
            result.lost += [self._told(result, victim, what) for what in lost]
        return ended

    def _starter(self, name: str, folder: Path, *, by_command: bool) -> Callable[[Path], Life]:
        words = words_of(name, folder, self._texts)
        world_size = 2 if "trainer.devices=2" in words else 1
        if by_command:
            return lambda log: CommandLife(words, log)
        if name not in self._composed:
            self._composed[name] = compose(words)
        run = replace(self._composed[name], run_folder=folder)
        return lambda log: ForkedLife(self._zygote, run, log, world_size=world_size)

    def _compare(self, result: Result, victim: Victim, reference: Victim) -> None:
        found = list(differences(victim.folder, reference.folder))
        if found:
            self._note(result, victim, "\n".join(found[:10]))
        else:
            result.num_finished += 1

    def _note(self, result: Result, victim: Victim, what: str) -> None:
        result.broken.append(self._told(result, victim, what))

    @staticmethod
    def _told(result: Result, victim: Victim, what: str) -> str:
        """With all that is needed to look into it."""
        logs = sorted(victim.log.parent.glob(f"{victim.log.name}*"))
        tails = [f"{log}:\n{_tail(log)}" for log in logs]
        where = f"{result.name}, seed {result.seed}, life {victim.num_lives} of {victim.folder}"
        return "\n".join([f"{where}: {what}", *tails])


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])
