"""Kill the runs of a case at moments drawn from a seed, and compare each with a run that was never killed."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from kill.cases import compose, get_overrides
from kill.disk import differences
from kill.lives import CommandLife, ForkedLife, Life, Zygote
from kill.victim import Victim, draw_moment
from support import write_texts

from recipes.config.resolved import ResolvedRun

# within which a forked life reaches its first row
START_SECONDS = 1.0
AFTER = ("start", "row", "save")


@dataclass(kw_only=True)
class Result:
    """Outcome of the kills of one case.

    Attributes:
        lost: Descriptions of complete checkpoints that were gone or skipped after a kill.
        broken: Descriptions of differences to the run never killed, and of lives that failed by themselves.
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
        """Seconds to the first new row, of forked lives that reached one."""
        found = [seconds for victim in self.victims for seconds in victim.recovery_seconds]
        return [seconds for seconds in found if seconds is not None]


class Killer:
    """Runs the kills of a case.

    Args:
        workplace: Folder of run folders and logs.
        zygote: Forks the ranks.
        seed: Of the moments, with the name of the case.
    """

    def __init__(self, workplace: Path, zygote: Zygote, *, seed: int) -> None:
        self._workplace = workplace
        self._texts = write_texts(workplace / "texts")
        self._zygote = zygote
        self._seed = seed
        self._composed: dict[str, ResolvedRun] = {}

    def kill(self, name: str, num_kills: int, *, num_by_command: int) -> Result:
        """Kill N times, some of them the real command, and compare every victim with the reference."""
        began = time.monotonic()
        rng = random.Random(f"{self._seed}/{name}")
        folder = self._workplace / name.replace(" ", "_")
        result = Result(name=name, seed=self._seed)
        reference = Victim(folder=folder / "reference", rng=rng)
        reference.folder.mkdir(parents=True)
        self._live(result, reference, name)
        by_command = set(rng.sample(range(num_kills), num_by_command))
        while not result.broken and (result.num_kills < num_kills or not result.victims):
            victim = Victim(folder=folder / f"victim_{len(result.victims)}", rng=rng)
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
        """Run one life, killed after the event named by `after`; return whether the run has finished."""
        moment = None
        if after is not None:
            # the command spends seconds on imports: it is killed only once it trains
            kind = "row" if by_command and after == "start" else after
            moment = draw_moment(victim.rng, kind, start_seconds=START_SECONDS)
        try:
            start = self._starter(name, victim.folder, by_command=by_command)
            ended = victim.live(start, moment, by_command=by_command)
        except AssertionError as error:
            self._record_failure(result, victim, str(error))
            return False
        finally:
            lost, victim.lost = victim.lost, []
            result.lost += [self._describe(result, victim, text) for text in lost]
        return ended

    def _starter(self, name: str, folder: Path, *, by_command: bool) -> Callable[[Path], Life]:
        overrides = get_overrides(name, folder, self._texts)
        world_size = 2 if "trainer.devices=2" in overrides else 1
        if by_command:
            return lambda log: CommandLife(overrides, log)
        if name not in self._composed:
            self._composed[name] = compose(overrides)
        run = replace(self._composed[name], run_folder=folder)
        return lambda log: ForkedLife(self._zygote, run, log, world_size=world_size)

    def _compare(self, result: Result, victim: Victim, reference: Victim) -> None:
        found = list(differences(victim.folder, reference.folder))
        if found:
            self._record_failure(result, victim, "\n".join(found[:10]))
        else:
            result.num_finished += 1

    def _record_failure(self, result: Result, victim: Victim, text: str) -> None:
        result.broken.append(self._describe(result, victim, text))

    @staticmethod
    def _describe(result: Result, victim: Victim, text: str) -> str:
        """Return the text with what is needed to debug it: seed, life, folder, ends of logs."""
        logs = sorted(victim.log.parent.glob(f"{victim.log.name}*"))
        tails = [f"{log}:\n{_tail(log)}" for log in logs]
        where = f"{result.name}, seed {result.seed}, life {victim.num_lives} of {victim.folder}"
        return "\n".join([f"{where}: {text}", *tails])


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])
