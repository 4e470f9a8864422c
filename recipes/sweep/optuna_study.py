"""The trials of an Optuna study as the jobs of a sweep; what a kill has left running goes on as the same trial."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from recipes.errors import ConfigError
from recipes.launcher.job import Job, State
from recipes.sweep.leaderboard import read_objective
from recipes.sweep.sweep import Sweep

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.distributions import BaseDistribution

LOGGER = logging.getLogger("lightning_recipes")
_FOLDER = "folder"  # of the sweep that a trial is of, where several share a storage
_OF_WHAT = "of_what"  # it is a study: objective, direction, space
_REPEATED = "repeated"  # of the study


class StudySource:
    """Asks the study for one job at a time, so that each proposal knows all results there are.

    Args:
        study: Optuna's.
        sweep: Takes the jobs.
        distributions: Of what is searched, by key.
        words_of: What to type to have the parameters of a trial.
        name_of: The name of a job's folder, from its words and number.
        num_trials: Of the study, those of earlier starts included.
        seed_sampler: The sampler for the trial of a number.
        prune_on: The metric that the pruner looks at; None: there is no pruner.
        prune_sign: -1 where less of it is better and the study maximizes, or the other way round.
    """

    def __init__(
        self,
        *,
        study: "Study",
        sweep: Sweep,
        distributions: Mapping[str, "BaseDistribution"],
        words_of: Callable[[Mapping[str, Any]], list[str]],
        name_of: Callable[[Sequence[str], int], str],
        num_trials: int,
        seed_sampler: Callable[[int], Any],
        prune_on: str | None,
        prune_sign: int = 1,
    ) -> None:
        self._study = study
        self._sweep = sweep
        self._distributions = dict(distributions)
        self._words_of = words_of
        self._name_of = name_of
        self._num_trials = num_trials
        self._seed_sampler = seed_sampler
        self._prune_on = prune_on
        self._prune_sign = prune_sign
        self._is_stopped = False
        # a sampler that has tried all there is says so; outside Optuna's own loop that is an error
        study.stop = self._stop  # type: ignore[method-assign]
        self._check_is_the_same()
        self._trials: dict[int, Trial] = {}  # by job number, of those that run
        self._reported: dict[int, set[int]] = {}
        self._take_up()

    def log_start(self) -> None:
        """What there is from an earlier start."""
        over = self._num_over()
        if over or self._cut:
            LOGGER.info(
                f"{over} trials are over from an earlier start, {len(self._cut)} go on where they were cut"
            )

    def more(self) -> Sequence[Job]:
        """The next trial; none where all have been asked for."""
        while True:
            if self._cut:
                trial = self._cut.pop(0)
            elif not self._is_stopped and self._num_asked_for() < self._num_trials:
                trial = self._ask()
            else:
                return []
            if (job := self._job_of(trial)) is not None:
                return [job]

    def ended(self, job: Job) -> None:
        """Tell the study; a trial that was cut stays open, for the next start."""
        from optuna.trial import TrialState

        trial = self._trials.pop(job.number)
        if job.state is State.PRUNED:
            self._study.tell(trial, state=TrialState.PRUNED)
        elif job.state is State.FINISHED:
            value = read_objective(job.folder, self._sweep.settings.objective)
            if value is None:
                objective = self._sweep.settings.objective
                LOGGER.error(f"job {job.number} has left no {objective}: a failed trial")
                self._study.tell(trial, state=TrialState.FAIL)
            else:
                self._study.tell(trial, value)
        elif job.state.has_failed:
            self._study.tell(trial, state=TrialState.FAIL)

    def should_prune(self, job: Job, rows: Sequence[Mapping[str, float]]) -> bool:
        if self._prune_on is None:
            return False
        trial, reported = self._trials[job.number], self._reported[job.number]
        for row in rows:
            step = int(row["step"])
            if self._prune_on in row and step not in reported:
                trial.report(self._prune_sign * row[self._prune_on], step)
                reported.add(step)
                if trial.should_prune():
                    LOGGER.info(
                        f"job {job.number} is pruned at step {step}: {self._prune_on}"
                        f" {row[self._prune_on]:.6g}"
                    )
                    return True
        return False

    def _take_up(self) -> None:
        """What earlier starts have left: trials that a kill cut open, and those to repeat."""
        from optuna.trial import Trial, TrialState

        folder, self._cut = str(self._sweep.folder.resolve()), []
        for told in self._study.get_trials(deepcopy=False):
            mine = _FOLDER not in told.user_attrs or told.user_attrs[_FOLDER] == folder
            if told.state is TrialState.RUNNING and mine:
                self._cut.append(Trial(self._study, told._trial_id))
            elif told.state.is_finished() and mine:
                self._sweep.claim(self._words_of(told.params))
            repeats = told.state is TrialState.FAIL and self._sweep.settings.retry_failed
            if repeats and mine and told.number not in self._repeated():
                self._study.set_user_attr(_REPEATED, [*self._repeated(), told.number])
                self._study.enqueue_trial(told.params, user_attrs={_FOLDER: folder})

    def _check_is_the_same(self) -> None:
        """A study goes on as what it was.

        Raises:
            ConfigError: It was of something else.
        """
        now = {
            "objective": self._sweep.settings.objective,
            "direction": self._sweep.settings.direction,
            "space": {key: str(one) for key, one in sorted(self._distributions.items())},
        }
        if _OF_WHAT not in self._study.user_attrs:
            self._study.set_user_attr(_OF_WHAT, now)
        was = self._study.user_attrs[_OF_WHAT]
        for name in now:
            if was[name] != now[name]:
                raise ConfigError(
                    f"hydra.sweep.dir={self._sweep.folder}",
                    f"the {name} of the study in it is {was[name]}, not {now[name]}",
                    "hydra.sweep.dir=<another folder>, or the same words as before",
                )

    def _stop(self) -> None:
        self._is_stopped = True

    def _num_asked_for(self) -> int:
        """Trials that have ended or run, here or, where several share a storage, elsewhere."""
        from optuna.trial import TrialState

        told = self._study.get_trials(deepcopy=False)
        return self._num_over() + sum(one.state is TrialState.RUNNING for one in told)

    def _num_over(self) -> int:
        """Trials with an end; one that failed and is repeated counts once."""
        told = self._study.get_trials(deepcopy=False)
        return sum(map(int, (one.state.is_finished() for one in told))) - len(self._repeated())

    def _repeated(self) -> list[int]:
        """Trials that have failed and been asked for again: what has ended cannot be marked itself."""
        attributes = self._study.user_attrs
        return list(attributes[_REPEATED]) if _REPEATED in attributes else []

    def _ask(self) -> "Trial":
        number = len(self._study.get_trials(deepcopy=False))
        self._study.sampler = self._seed_sampler(number)
        trial = self._study.ask(self._distributions)
        trial.set_user_attr(_FOLDER, str(self._sweep.folder.resolve()))
        return trial

    def _job_of(self, trial: "Trial") -> Job | None:
        """The job of a trial; None where its end is known without running it."""
        for key, distribution in self._distributions.items():
            trial._suggest(key, distribution)  # what a kill has kept it from being told
        words = self._words_of(trial.params)
        job, mistakes = self._sweep.prepare(words, trial.number, partial(self._name_of, words))
        self._trials[job.number] = trial
        told = self._study.get_trials(deepcopy=False)[trial.number]
        self._reported[job.number] = set(told.intermediate_values)
        if mistakes:
            self._sweep.refuse(job, mistakes)
        if not self._sweep.is_to_start(job):
            self.ended(job)
            return None
        return job
