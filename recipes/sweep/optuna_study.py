"""The trials of an Optuna study as the jobs of a sweep; a trial interrupted by a kill resumes as the same trial."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from recipes.errors import ConfigError
from recipes.launcher.job import Job, State
from recipes.runtime.console import LOGGER
from recipes.sweep.leaderboard import read_objective
from recipes.sweep.sweep import Sweep

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, TrialState

# attributes in Optuna's storage; the names are part of existing studies
_FOLDER = "folder"  # trial attribute: its sweep, as several sweeps may share a storage
_DEFINITION = "of_what"  # of the study: objective, direction, space
_RETRIED = "repeated"  # of the study: failed trials that were queued again


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
        # a sampler that has tried everything calls study.stop(), which raises outside of study.optimize
        study.stop = self._stop  # type: ignore[method-assign]
        self._check_definition()
        self._trials: dict[int, Trial] = {}  # running, by job number
        self._reported: dict[int, set[int]] = {}  # steps reported to Optuna, by job number
        self._interrupted: list[Trial] = []
        self._load_earlier_trials()

    def log_start(self) -> None:
        """Log the trials of earlier commands."""
        num_ended = self._num_ended()
        if num_ended or self._interrupted:
            LOGGER.info(f"{num_ended} trials have already ended, {len(self._interrupted)} are resumed")

    def next_jobs(self) -> Sequence[Job]:
        """Return the next trial; none if all have been started."""
        while True:
            if self._interrupted:
                trial = self._interrupted.pop(0)
            elif not self._is_stopped and self._num_started() < self._num_trials:
                trial = self._ask()
            else:
                return []
            if (job := self._prepare(trial)) is not None:
                return [job]

    def job_ended(self, job: Job) -> None:
        """Report the result to the study; an interrupted trial stays open, to be resumed later."""
        from optuna.trial import TrialState

        trial = self._trials.pop(job.number)
        if job.state is State.PRUNED:
            self._study.tell(trial, state=TrialState.PRUNED)
        elif job.state is State.FINISHED:
            objective = self._sweep.settings.objective
            value = read_objective(job.folder, objective)
            if value is None:
                LOGGER.error(f"job {job.number} has no {objective}; its trial counts as failed")
                self._study.tell(trial, state=TrialState.FAIL)
            else:
                self._study.tell(trial, value)
        elif job.state.has_failed:
            self._study.tell(trial, state=TrialState.FAIL)

    def should_prune(self, job: Job, rows: Sequence[Mapping[str, float]]) -> bool:
        """Report new values of the metric to Optuna; return whether its pruner stops the trial."""
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
                        f"job {job.number} is pruned at step {step}: {self._prune_on} {row[self._prune_on]:.6g}"
                    )
                    return True
        return False

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
            is_failed = frozen.state is TrialState.FAIL and self._sweep.settings.retry_failed
            if is_failed and frozen.number not in self._retried:
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
        """Count trials that have ended or run, here or in another sweep of the same storage."""
        from optuna.trial import TrialState

        return self._num_ended() + len(self._get_trials(TrialState.RUNNING))

    def _num_ended(self) -> int:
        """Count trials that have ended; a failed one and its retry count once."""
        ended = [trial for trial in self._get_trials() if trial.state.is_finished()]
        return len(ended) - len(self._retried)

    def _get_trials(self, *states: "TrialState") -> list["FrozenTrial"]:
        trials: list[FrozenTrial] = self._study.get_trials(deepcopy=False, states=states or None)
        return trials

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
        """Return the job of a trial; None if it has a result or an invalid config."""
        for key, distribution in self._distributions.items():
            trial._suggest(key, distribution)  # parameters that a kill kept from being stored
        overrides = self._make_overrides(trial.params)
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
