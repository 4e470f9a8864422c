"""The trials of an Optuna study as the jobs of a sweep; a trial interrupted by a kill resumes as the same trial.

How a job ended is reported to the study as follows. A run that diverged or ran out of memory is a result: with these
settings it ends that way again. Its value is the worst there is, inf or -inf, because every sampler ranks a completed
trial, while TPE alone learns from pruned ones and none from failed ones. A run that crashed says nothing about its
settings and fails.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from recipes.errors import ConfigError
from recipes.launcher.job import Job, State
from recipes.runtime.console import LOGGER
from recipes.sweep.command_line import job_overrides
from recipes.sweep.leaderboard import has_objective, read_objective
from recipes.sweep.sweep import Sweep

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, TrialState

# attributes in Optuna's storage; the names are part of existing studies
_FOLDER = "folder"  # trial attribute: its sweep, as several sweeps may share a storage
_DEFINITION = "of_what"  # of the study: objective, direction, space
_RETRIED = "repeated"  # of the study: failed trials that were queued again
_OVERRIDES = "overrides"  # of a trial: those of its job
_STATE = "state"  # of a trial: how its job ended
# of a trial: same overrides as an earlier trial; copies its result and does not run
_REPEATS = "repeats"

# a run with such an end would end the same way again
RESULTS = frozenset({State.FINISHED, State.PRUNED, State.DIVERGED, State.OUT_OF_MEMORY})
# in a row; then the sampler is considered to have nothing new. Each takes about 50 ms in a study on disk.
_MAX_REPETITIONS = 50


class StudySource:
    """Ask the study for one job at a time, so that each proposal uses all results so far.

    Args:
        study: Optuna's study.
        sweep: The sweep that runs the trials.
        distributions: The search space, by key.
        make_overrides: Returns a trial's overrides from its parameters.
        get_folder_name: Returns the name of a job's folder from its overrides and number.
        num_trials: Trials of the study, including those of earlier commands.
        make_sampler: Returns the sampler for the trial with this number.
        prune_on: The metric that the pruner compares; None disables pruning.
        prune_sign: -1 if a lower metric is better but the study maximizes, or the other way round.

    Attributes:
        has_failed: Whether the storage took no more writes, as on a full disk: no trial was started since then.

    Raises:
        ConfigError: The folder has a study with another objective, direction or space.
    """

    def __init__(
        self,
        *,
        study: "Study",
        sweep: Sweep,
        distributions: Mapping[str, "BaseDistribution"],
        make_overrides: Callable[[Mapping[str, Any]], list[str]],
        get_folder_name: Callable[[Sequence[str], int], str],
        num_trials: int,
        make_sampler: Callable[[int], Any],
        prune_on: str | None,
        prune_sign: int = 1,
    ) -> None:
        self._study = study
        self._sweep = sweep
        self._distributions = dict(distributions)
        self._make_overrides = make_overrides
        self._get_folder_name = get_folder_name
        self._num_trials = num_trials
        self._make_sampler = make_sampler
        self._prune_on = prune_on
        self._prune_sign = prune_sign
        self._folder = str(sweep.folder.resolve())
        self._is_stopped = False
        self.has_failed = False
        # a sampler that has tried everything calls study.stop(), which raises outside of study.optimize
        study.stop = self._stop
        self._check_definition()
        self._num_combinations = count_combinations(self._distributions.values())
        self._trials: dict[int, Trial] = {}  # running, by job number
        self._repetitions: dict[int, list[Trial]] = {}  # that wait for the result of a running trial, by its job number
        self._reported: dict[int, set[int]] = {}  # steps reported to Optuna, by job number
        self._interrupted: list[Trial] = []
        self._load_earlier_trials()

    def log_start(self) -> None:
        """Log the trials of earlier commands."""
        num_ended = self._num_ended()
        if num_ended or self._interrupted:
            LOGGER.info(f"{num_ended} trials have already ended, {len(self._interrupted)} are resumed")

    def next_jobs(self) -> Sequence[Job]:
        """Return the next trial; none if all have been started, only repetitions are proposed, or nothing is stored."""
        with self._stopping_at_error():
            return self._next_jobs()
        return []

    def _next_jobs(self) -> Sequence[Job]:
        while self._interrupted and not self.has_failed:
            if (job := self._prepare(self._interrupted.pop(0))) is not None:
                return [job]
        num_repeated = 0
        while (
            num_repeated < _MAX_REPETITIONS
            and not (self._is_stopped or self.has_failed)
            and self._num_started() < self._num_trials
            and not self._is_used_up()
        ):
            trial = self._ask()
            if (job := self._prepare(trial)) is not None:
                return [job]
            num_repeated += _REPEATS in self._get_trials()[trial.number].user_attrs
        if not (self._trials or self.has_failed) and self._num_ended() < self._num_trials:
            self._log_early_end()
        return []

    def job_ended(self, job: Job) -> None:
        """Report the result to the study; an interrupted trial stays open, to be resumed later."""
        trial = self._trials.pop(job.number)
        repetitions = self._repetitions.pop(job.number, [])
        if job.state.is_cut:
            return
        with self._stopping_at_error():
            trial.set_user_attr(_STATE, str(job.state))
            self._tell(trial, job)
            first = self._get_trials()[trial.number]
            for repetition in repetitions:
                self._repeat(repetition, first)

    def should_prune(self, job: Job, rows: Sequence[Mapping[str, float]]) -> bool:
        """Report new values of the metric to Optuna; return whether its pruner stops the trial."""
        if self._prune_on is None or self.has_failed:
            return False
        with self._stopping_at_error():
            return self._report(job, rows, self._prune_on)
        return False

    def _report(self, job: Job, rows: Sequence[Mapping[str, float]], metric: str) -> bool:
        trial, reported = self._trials[job.number], self._reported[job.number]
        for row in rows:
            step = int(row["step"])
            if metric in row and step not in reported:
                trial.report(self._prune_sign * row[metric], step)
                reported.add(step)
                if trial.should_prune():
                    LOGGER.info(f"job {job.number} is pruned at step {step}: {metric} {row[metric]:.6g}")
                    return True
        return False

    @contextlib.contextmanager
    def _stopping_at_error(self) -> Iterator[None]:
        """Start no more trials once the storage fails: running ones end, and the same command reads their results."""
        from optuna.exceptions import StorageInternalError
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except (StorageInternalError, SQLAlchemyError) as error:
            if not self.has_failed:
                reason = str(error.__cause__ or error).strip().partition("\n")[0]
                LOGGER.error(
                    f"The study could not be written: {reason}; no further trial starts until there is room,"
                    " with the same command"
                )
            self.has_failed = True

    def _load_earlier_trials(self) -> None:
        """Collect the trials to resume, and queue the failed ones to retry."""
        from optuna.trial import Trial, TrialState

        for frozen in self._get_trials():
            if frozen.user_attrs.get(_FOLDER, self._folder) != self._folder:
                continue  # belongs to another sweep in the same storage
            if frozen.state is TrialState.RUNNING:
                self._interrupted.append(Trial(self._study, frozen._trial_id))
            elif frozen.state.is_finished():
                # its job is taken: a new trial may propose the same parameters
                self._sweep.claim(self._make_overrides(frozen.params))
            retries = self._sweep.settings.retry_failed and _has_failed(frozen)
            if retries and frozen.number not in self._retried:
                self._study.set_user_attr(_RETRIED, [*self._retried, frozen.number])
                self._study.enqueue_trial(frozen.params, user_attrs={_FOLDER: self._folder})

    def _check_definition(self) -> None:
        """Check that the study in the folder matches the requested one."""
        now = {
            "objective": self._sweep.settings.objective,
            "direction": self._sweep.settings.direction,
            "space": {key: str(distribution) for key, distribution in sorted(self._distributions.items())},
        }
        if _DEFINITION not in self._study.user_attrs:
            self._study.set_user_attr(_DEFINITION, now)
        before = self._study.user_attrs[_DEFINITION]
        for name in now:
            if before[name] != now[name]:
                raise ConfigError(
                    f"hydra.sweep.dir={self._sweep.folder}",
                    f"the existing study uses {name} {before[name]}, not {now[name]}",
                    "hydra.sweep.dir=<another folder>, or the same overrides as before",
                )

    def _stop(self) -> None:
        self._is_stopped = True

    def _num_started(self) -> int:
        """Count trials that have ended or run, here or in another sweep of the same storage, without repetitions."""
        from optuna.trial import TrialState

        running = self._get_trials(TrialState.RUNNING)
        return self._num_ended() + sum(_REPEATS not in trial.user_attrs for trial in running)

    def _num_ended(self) -> int:
        """Count trials that have ended; a failed one and its retry count once, a repetition does not count."""
        ended = [trial for trial in self._get_trials() if trial.state.is_finished()]
        return sum(_REPEATS not in trial.user_attrs for trial in ended) - len(self._retried)

    def _is_used_up(self) -> bool:
        """Whether each combination of a finite search space has been started."""
        if self._num_combinations is None:
            return False
        # a typed override may have changed since an earlier command: then its trials are others
        started = {
            tuple(overrides)
            for trial in self._get_firsts()
            if (overrides := trial.user_attrs.get(_OVERRIDES)) is not None
            and overrides == self._make_job_overrides(trial.params)
        }
        return len(started) >= self._num_combinations

    def _log_early_end(self) -> None:
        ended = f"the study ends after {self._num_ended()} of {self._num_trials} trials"
        if self._is_used_up():
            LOGGER.info(f"Every combination of the search space has been run ({self._num_combinations}): {ended}")
        elif self._is_stopped:
            LOGGER.info(f"The sampler has tried everything: {ended}")
        else:
            LOGGER.info(f"The last {_MAX_REPETITIONS} proposals were all repeats: {ended}")

    def _get_trials(self, *states: "TrialState") -> list["FrozenTrial"]:
        trials: list[FrozenTrial] = self._study.get_trials(deepcopy=False, states=states or None)
        return trials

    def _get_firsts(self) -> list["FrozenTrial"]:
        """Return the trials that are or were run, without those that are retried."""
        return [
            trial
            for trial in self._get_trials()
            if _REPEATS not in trial.user_attrs and trial.number not in self._retried
        ]

    @property
    def _retried(self) -> list[int]:
        """Numbers of failed trials queued again; kept on the study, as an ended trial is read-only."""
        return list(self._study.user_attrs.get(_RETRIED, []))

    def _ask(self) -> "Trial":
        # a new sampler for each trial: a restart then proposes the same parameters
        self._study.sampler = self._make_sampler(len(self._get_trials()))
        trial = self._study.ask(self._distributions)
        trial.set_user_attr(_FOLDER, self._folder)
        return trial

    def _prepare(self, trial: "Trial") -> Job | None:
        """Return the job of a trial; None if it repeats another one, has a result or an invalid config."""
        for key, distribution in self._distributions.items():
            trial._suggest(key, distribution)  # parameters that a kill kept from being stored
        overrides = self._make_overrides(trial.params)
        trial.set_user_attr(_OVERRIDES, self._make_job_overrides(trial.params))
        if self._is_repetition(trial):
            return None
        get_folder_name = partial(self._get_folder_name, overrides)
        job, mistakes = self._sweep.prepare(overrides, trial.number, get_folder_name)
        self._trials[job.number] = trial
        self._reported[job.number] = set(self._get_trials()[trial.number].intermediate_values)
        if mistakes:
            self._sweep.reject(job, mistakes)
        if not self._sweep.should_start(job):
            self.job_ended(job)
            return None
        return job

    def _make_job_overrides(self, params: Mapping[str, Any]) -> list[str]:
        return job_overrides(self._make_overrides(params))

    def _is_repetition(self, trial: "Trial") -> bool:
        """Give a trial the result of an earlier one with the same overrides, now or when that one has ended.

        The seed is one of the overrides, or the same for all: a second run would be the first one again.
        """
        overrides = trial.user_attrs[_OVERRIDES]
        for number, running in self._trials.items():
            if running.user_attrs[_OVERRIDES] == overrides:
                trial.set_user_attr(_REPEATS, running.number)
                self._repetitions.setdefault(number, []).append(trial)
                return True
        for first in self._get_firsts():
            if first.state.is_finished() and first.user_attrs.get(_OVERRIDES) == overrides:
                self._repeat(trial, first)
                return True
        return False

    def _repeat(self, trial: "Trial", first: "FrozenTrial") -> None:
        """Report the result of an ended trial as that of another one with the same overrides."""
        trial.set_user_attr(_REPEATS, first.number)
        for step, value in first.intermediate_values.items():
            trial.report(value, step)  # a pruned trial is ranked by them
        self._study.tell(trial, first.values if first.state.name == "COMPLETE" else None, state=first.state)
        LOGGER.info(f"trial {trial.number} repeats trial {first.number} and gets its result")

    def _tell(self, trial: "Trial", job: Job) -> None:
        from optuna.trial import TrialState

        if job.state is State.PRUNED:
            self._study.tell(trial, state=TrialState.PRUNED)
            return
        objective, direction = self._sweep.settings.objective, self._sweep.settings.direction
        value = None
        if job.state is State.FINISHED and not has_objective(job.folder, objective):
            LOGGER.error(f"job {job.number} has no {objective}; its trial counts as failed")
        elif job.state in RESULTS:
            value = read_objective(job.folder, objective) if job.state is State.FINISHED else None
            if value is None:  # or NaN or inf, as of a perplexity that overflows
                value = math.inf if direction == "minimize" else -math.inf
        self._study.tell(trial, value, state=TrialState.FAIL if value is None else TrialState.COMPLETE)


def count_combinations(distributions: Iterable["BaseDistribution"]) -> int | None:
    """Return the size of a search space; None if a parameter can take any value of an interval."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    sizes = []
    for distribution in distributions:
        if isinstance(distribution, CategoricalDistribution):
            sizes.append(len(distribution.choices))
        elif isinstance(distribution, IntDistribution):
            sizes.append((distribution.high - distribution.low) // distribution.step + 1)
        elif isinstance(distribution, FloatDistribution) and distribution.step is not None:
            sizes.append(round((distribution.high - distribution.low) / distribution.step) + 1)
        elif not distribution.single():
            return None
    return math.prod(sizes)


def _has_failed(trial: "FrozenTrial") -> bool:
    """Return whether `sweep.retry_failed=true` runs a trial again, like any job with its end."""
    state = trial.user_attrs.get(_STATE)
    has_failed = trial.state.name == "FAIL" if state is None else State(state).has_failed
    return has_failed and _REPEATS not in trial.user_attrs
