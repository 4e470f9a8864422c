"""Run the stages of a pipeline in order: skip those that are done, resume the one that was cut, rerun what changed."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from recipes.checkpoint.resume import newest_checkpoint
from recipes.config import compose_and_check
from recipes.config.check.composition_errors import COMPOSITION_ERRORS
from recipes.config.commands import list_classes, repeat_command
from recipes.config.overrides import is_about_sweep, make_override
from recipes.config.resolved import Awaited, ResolvedRun
from recipes.config.resume import ResumedRun, select_inherited
from recipes.errors import ConfigError, format_report, type_command
from recipes.files import tolerating, write_atomically
from recipes.launcher import Launcher
from recipes.launcher.composed_job import compose_job
from recipes.launcher.job import CLUSTER_JOB, Job, State
from recipes.pipeline.command_line import EXPORTED, PipelineCommand, Stage, read_command
from recipes.run_folder import (
    CONFIG_FILE,
    EVALUATIONS,
    PAGE_FILE,
    PIPELINE_FILE,
    find_free_name,
    read_summary,
)
from recipes.runtime.console import LOGGER
from recipes.runtime.exit_codes import ExitCode
from recipes.sweep.live_table import format_seconds
from recipes.sweep.progress import Progress

_SHOWN_LINES = 12  # of what a stage has printed
# sections that say where and how a stage is started and shown, and not what it computes
_NOT_COMPUTED = (
    *("launcher", "ignore_slurm", "sweep", "plan", "dashboard", "resume", "start_from"),
    *("name", "tags", "logger", "profile_steps"),
)


@dataclass(kw_only=True)
class Entry:
    """What `pipeline.json` has of a stage that was started.

    Attributes:
        folder: Name of its folder in that of the pipeline.
        overrides: What was typed for it.
        settings: Hash of its resolved config, without where its weights come from.
        weights: Hash of the checkpoint that it started from; None: of none.
        state: How it ended, as a job of a sweep.
        exit_code: Its exit code; None until it ends.
        seconds: How long its last start took; None until it ends.
        cluster_job: Job id on the cluster of its last start; None if it does not run on one.
    """

    folder: str
    overrides: list[str]
    settings: str
    weights: str | None
    state: State
    exit_code: int | None = None
    seconds: float | None = None
    cluster_job: str | None = None


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A stage, composed before anything has started.

    Attributes:
        stage: The stage.
        run: Its run, checked against that of the stage before; None if it cannot be composed.
        mistakes: Errors in its config.
    """

    stage: Stage
    run: ResolvedRun | None
    mistakes: Sequence[ConfigError]

    @property
    def settings(self) -> str:
        """Hash of what the stage computes."""
        assert self.run is not None, "a pipeline with errors is not started"
        starts_from_another = self.stage.source is not None or self.run.start_from is not None
        text = f"{self.run.describe_settings(without=_NOT_COMPUTED)} {starts_from_another}"
        return hashlib.sha256(text.encode()).hexdigest()


def check_pipeline(
    typed: Sequence[str], *, config_folder: Path, config_name: str
) -> tuple[PipelineCommand, list[Planned], list[ConfigError]]:
    """Return what a pipeline is made of, its stages composed, and all errors in it; builds nothing.

    Args:
        typed: Overrides of the command line.
        config_folder: The folder from which stages are composed.
        config_name: The primary config.
    """
    command = read_command(typed, config_folder=config_folder)
    planned = plan_stages(command.stages, config_folder=config_folder, config_name=config_name)
    return command, planned, [*command.mistakes, *name_stages(planned)]


def plan_stages(stages: Sequence[Stage], *, config_folder: Path, config_name: str) -> list[Planned]:
    """Compose and check all stages, each against the config of the one that it is to start from.

    Args:
        stages: The stages.
        config_folder: The folder from which they are composed.
        config_name: The primary config.
    """
    planned: dict[str, Planned] = {}
    for stage in stages:
        source = None if stage.source is None else planned[stage.source]
        before, awaited = list[str](), None
        if source is not None and not stage.trains:
            before = source.stage.overrides if source.mistakes else _inherit(source, stage, config_folder, config_name)
        if source is not None and source.run is not None:
            awaited = Awaited(name=source.stage.name, config=source.run.config, saves=source.run.saves)
        run, mistakes = compose_and_check(
            [*before, *stage.overrides], config_folder=config_folder, config_name=config_name, awaited=awaited
        )
        if source is not None and source.mistakes:
            inherited = [*map(str, source.mistakes)]
            mistakes = [mistake for mistake in mistakes if stage.trains or str(mistake) not in inherited]
        acts_alone = run is not None and not run.mode.asks and (run.mode.trains or run.mode.needs_checkpoint)
        if run is not None and not mistakes and not acts_alone:
            reason = "a stage trains, or acts on the run of another one, and nobody answers it"
            mistakes = [ConfigError(f"mode={run.mode.name}", reason, "mode=evaluate, test, predict, sample or export")]
        # names of stages that export none are mistakes of the command line already
        models = {
            *(str(each.stage.export) for each in planned.values() if each.stage.exports),
            *(s.name for s in stages),
        }
        mistakes = [mistake for mistake in mistakes if not _is_awaited(mistake, models)]
        if run is not None and not mistakes:
            mistakes = [*_check_written(run, planned.values())]
        planned[stage.name] = Planned(stage=stage, run=run, mistakes=mistakes)
    return list(planned.values())


def _is_awaited(mistake: ConfigError, models: Iterable[str]) -> bool:
    """Return whether an error is that a model is not there which an earlier stage exports: a start checks it again."""
    key, _, path = mistake.setting.partition("=")
    return key in EXPORTED and not Path(path).exists() and path in models


def _inherit(source: Planned, stage: Stage, config_folder: Path, config_name: str) -> list[str]:
    """Return the overrides of a run that apply to a mode which acts on it: none of an option that the mode replaces."""
    before = source.stage.overrides
    begun = ResumedRun(folder=source.stage.folder, config={}, overrides=before, search_path=[])
    inherit = partial(select_inherited, begun, folder=config_folder, name=config_name)
    try:
        return inherit(stage.overrides)[0]
    except COMPOSITION_ERRORS:
        pass  # the check of the stage reports what is wrong; the others may still replace options
    valid: list[str] = []
    for text in stage.overrides:
        with suppress(*COMPOSITION_ERRORS):
            before = inherit([*valid, text])[0]
            valid.append(text)
    return before


def _check_written(run: ResolvedRun, before: Iterable[Planned]) -> Iterator[ConfigError]:
    """Reject a file or folder outside that of the stage which another stage writes, too."""
    path = run.config["mode"].get("path")
    for other in before if isinstance(path, str) else ():
        theirs = None if other.run is None else other.run.config["mode"].get("path")
        if isinstance(theirs, str) and Path(theirs).expanduser().resolve() == Path(path).expanduser().resolve():
            reason = f"stage {other.stage.name} writes there, too"
            yield ConfigError(
                f"mode.path={path}", reason, "mode.path=<another one>, or null: in the folder of the stage"
            )


def name_stages(planned: Sequence[Planned]) -> Iterator[ConfigError]:
    """Yield each error once, with the stages that have it."""
    found: dict[tuple[str, str, str], list[str]] = {}
    sweep = type_command("-m ")
    for each in planned:
        for mistake in each.mistakes:
            fix = mistake.fix
            if sweep in fix:  # a pipeline is not swept
                fix = fix.partition(sweep)[0].removesuffix(", or ") or f"{mistake.setting.partition('=')[0]}=<value>"
            found.setdefault((mistake.setting, mistake.reason, fix), []).append(each.stage.name)
    for (setting, reason, fix), names in found.items():
        stages = f"stage{'s' if len(names) > 1 else ''} {', '.join(names)}"
        yield ConfigError(f"{stages}: {setting}", reason, fix)


class Pipeline:
    """The stages of one pipeline's folder, as a source of jobs: one at a time, each once those before have finished.

    Args:
        name: Name of the pipeline.
        folder: Its folder.
        planned: Its stages, checked.
        launcher: Starts each stage.
        config_folder: The folder from which stages are composed.
        config_name: The primary config.
        typed: The overrides of the command line, for the printed command that goes on.
        write_page: Writes the page of all stages.
    """

    def __init__(
        self,
        *,
        name: str,
        folder: Path,
        planned: Sequence[Planned],
        launcher: Launcher,
        config_folder: Path,
        config_name: str,
        typed: Sequence[str],
        write_page: Callable[[Mapping[str, Any], Path], None],
    ) -> None:
        self.name = name
        self.folder = folder
        self.launcher = launcher
        self._where: dict[str, Any] = {"config_folder": config_folder, "config_name": config_name}
        self._typed = typed
        self._write_page = write_page
        self._entries = read_state(folder)
        self._planned = planned
        self._left = list(enumerate(planned))
        self.exit_code: int = ExitCode.FINISHED
        # for the table; those of an earlier command have their results
        self.jobs = [Job(number=i + 1, folder=each.stage.folder, overrides=[]) for i, each in enumerate(planned)]
        self._is_running = False
        self._log_bytes = 0  # of earlier starts, in the log of the running stage

    # a source of jobs, see `recipes.sweep.pool.Source`

    def next_jobs(self) -> Sequence[Job]:
        """Return the next stage that is not done, once no other one runs; empty if there is none, or one has failed."""
        while self._left and not self._is_running and self.exit_code == ExitCode.FINISHED:
            index, planned = self._left.pop(0)
            stage, job = planned.stage, self.jobs[index]
            weights = self._identify_source(planned)
            entry = self._entries.get(stage.name)
            if entry is not None and self._is_done(entry, planned, weights):
                self._renumber(entry, stage)
                job.state, job.exit_code, job.seconds = entry.state, entry.exit_code, entry.seconds
                LOGGER.info(f"{self._title(index)}: finished before, {stage.folder}")
                continue
            if self._make_room(entry, planned, weights) and entry is not None:
                # it may still be in the queue of a cluster, where this command was killed and not its jobs
                job.cluster_job, job.exit_code = entry.cluster_job, entry.exit_code
            if mistakes := self._compose(stage, job):
                LOGGER.error(format_report(mistakes, f"Stage {stage.name} was not started."))
                job.state, self.exit_code = State.REFUSED, ExitCode.INVALID_CONFIG
                return []
            goes_on = newest_checkpoint(stage.folder) is not None
            self._entries[stage.name] = Entry(
                folder=stage.folder.name,
                overrides=stage.overrides,
                settings=planned.settings,
                weights=weights,
                state=State.WAITING,
                exit_code=job.exit_code,
                cluster_job=job.cluster_job,
            )
            self._save()
            LOGGER.info(f"{self._title(index)}{', resumed' if goes_on else ''}, {stage.folder}")
            log = self.launcher.log_path(job)
            self._log_bytes = log.stat().st_size if log.is_file() else 0
            self._is_running = True
            return [job]
        return []

    def job_ended(self, job: Job) -> None:
        """Log what a stage that trains nothing has printed; any stage but a finished one ends the pipeline."""
        self._is_running = False
        if not self._planned[job.number - 1].stage.trains or job.state is not State.FINISHED:
            LOGGER.info(_read_end(self.launcher.log_path(job), self._log_bytes))
        if job.state is not State.FINISHED:
            code = job.exit_code
            self.exit_code = ExitCode.CRASHED if code is None or code < 0 else code

    def should_prune(self, job: Job, rows: object) -> bool:
        """Return False: no stage is stopped in favor of another."""
        return False

    def on_change(self, job: Job) -> None:
        """Write `pipeline.json`, and the page once the stage has ended."""
        entry = self._entries[self._planned[job.number - 1].stage.name]
        entry.state, entry.exit_code, entry.seconds = job.state, job.exit_code, job.seconds
        entry.cluster_job = job.cluster_job
        self._save()
        if job.exit_code is not None:
            self.write_page()

    def write_page(self) -> None:
        """Write `report.html`; an error is logged, as a page must not stop a stage."""
        path = self.folder / PAGE_FILE
        names = [each.stage.name for each in self._planned]
        shown = {name: asdict(self._entries[name]) for name in names if name in self._entries}
        try:
            with tolerating(path):
                self._write_page(shown, path)
        except Exception as error:
            LOGGER.error(f"Cannot write {path}: {type(error).__name__}: {error}")

    def log_end(self) -> None:
        """Log the stages with their results, and how to go on if one is left."""
        LOGGER.info("\n".join(draw_table([each.stage for each in self._planned], self.jobs)))
        if (page := self.folder / PAGE_FILE).is_file():
            LOGGER.info(f"The stages on one page: {page}")
        cut = next((job for job in self.jobs if job.state is not State.FINISHED), None)
        if cut is None:
            return
        # what was not started has no log, unless its config is wrong, which is reported by now
        log = f"; its log: {self.launcher.log_path(cut)}" if cut.exit_code is not None else ""
        name, state = self._planned[cut.number - 1].stage.name, str(cut.state).replace("_", " ")
        LOGGER.error(f"Stage {name} {state}{log}; to go on: {repeat_command(self._typed)}")

    def names(self) -> dict[int, dict[str, str]]:
        """Return the name of each stage by the number of its job."""
        return {job.number: {"stage": each.stage.name} for job, each in zip(self.jobs, self._planned, strict=True)}

    def _title(self, index: int) -> str:
        return f"stage {index + 1} of {len(self._planned)}: {self._planned[index].stage.name}"

    def _is_done(self, entry: Entry, planned: Planned, weights: str | None) -> bool:
        """Return whether a stage has finished with these settings, from these weights."""
        is_same = entry.settings == planned.settings and weights in (None, entry.weights)
        return entry.state is State.FINISHED and is_same and (self.folder / entry.folder).is_dir()

    def _identify_source(self, planned: Planned) -> str | None:
        """Return the hash of the weights that a stage starts from and reads; None if there are none any more."""
        of_source = self._identify_start(planned)
        by_name = {each.stage.name: each for each in self._planned}
        read = [self._identify_start(by_name[name]) for name in planned.stage.reads]
        if not read:
            return of_source
        return None if None in read else hashlib.sha256(" ".join(map(str, [of_source, *read])).encode()).hexdigest()

    def _identify_start(self, planned: Planned) -> str | None:
        """Return the hash of the checkpoint that a stage starts from or acts on; None if there is none any more."""
        source, run = planned.stage.source, planned.run
        assert run is not None, "a pipeline with errors is not started"
        named = run.start_from if planned.stage.trains else run.resume
        path = next((each.stage.folder for each in self._planned if each.stage.name == source), None)
        path = path or (None if named is None else Path(named))
        checkpoint = None if path is None else newest_checkpoint(path) or path
        file = None if checkpoint is None else checkpoint / "manifest.json"
        return hashlib.sha256(file.read_bytes()).hexdigest() if file is not None and file.is_file() else None

    def _make_room(self, entry: Entry | None, planned: Planned, weights: str | None) -> bool:
        """Set aside what is in the folder of a stage, unless the stage goes on there; return whether it does."""
        stage = planned.stage
        if entry is not None and entry.settings == planned.settings and weights in (None, entry.weights):
            self._renumber(entry, stage)
            return True
        old = stage.folder if entry is None else self.folder / entry.folder
        if old.exists():
            LOGGER.info(f"stage {stage.name} {_explain_change(entry, planned)}: {_set_aside(old)}")
        return False

    def _renumber(self, entry: Entry, stage: Stage) -> None:
        """Move the folder of a stage that has another number now, as one before it has come or gone."""
        if entry.folder != stage.folder.name and (self.folder / entry.folder).is_dir():
            if stage.folder.exists():
                LOGGER.info(_set_aside(stage.folder))
            (self.folder / entry.folder).rename(stage.folder)
            LOGGER.info(f"stage {stage.name} is moved from {entry.folder} to {stage.folder.name}")
            entry.folder = stage.folder.name
            self._save()

    def _compose(self, stage: Stage, job: Job) -> list[ConfigError]:
        source = next((each.stage.folder for each in self._planned if each.stage.name == stage.source), None)
        job.overrides = list(stage.overrides)
        if stage.trains:
            starts = [] if source is None else [make_override("start_from", str(source))]
            job.overrides += [*starts, "resume=auto"]
        elif source is not None:
            job.overrides.append(make_override("resume", str(source)))
            if (source / CONFIG_FILE).is_file():
                job.overrides += list_classes(source, job.overrides)
        return compose_job(job, self.launcher, job.overrides, **self._where)

    def _save(self) -> None:
        state = {"pipeline": self.name, "stages": {name: asdict(entry) for name, entry in self._entries.items()}}
        path = self.folder / PIPELINE_FILE
        with tolerating(path):
            write_atomically(path, json.dumps(state, indent=1) + "\n", fsync=True)


def _read_end(log: Path, offset: int) -> str:
    """Return the last lines of a log after this number of bytes, indented."""
    written = log.read_bytes()[offset:] if log.is_file() else b""
    lines = written.decode(errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-_SHOWN_LINES:])


def _set_aside(folder: Path) -> str:
    """Rename a folder, and return what to log of it."""
    aside = folder.with_name(f"{folder.name}_replaced")
    aside = find_free_name(aside) if aside.exists() else aside
    folder.rename(aside)
    return f"{folder.name} is kept as {aside.name}"


def _explain_change(entry: Entry | None, planned: Planned) -> str:
    """Return why a stage runs again, as the end of a sentence."""
    if entry is None:
        return "has not run here"
    if entry.settings == planned.settings:
        return "starts from other weights"
    before, now = (
        [text for text in texts if not is_about_sweep(text)] for texts in (entry.overrides, planned.stage.overrides)
    )
    if changed := [text for text in now if text not in before] or [f"no {text}" for text in before if text not in now]:
        return f"has changed ({' '.join(changed)})"
    return (
        "has other settings in conf/"
        if planned.stage.trains
        else f"acts on stage {planned.stage.source}, which has changed"
    )


def draw_table(stages: Sequence[Stage], jobs: Sequence[Job]) -> list[str]:
    """Return the lines of a table of all stages with their results, without columns that no stage has."""
    rows = [
        {
            "stage": stage.name,
            "state": str(job.state).replace("_", " "),
            **_read_results(stage.folder),
            "time": "" if job.seconds is None else format_seconds(job.seconds),
            "folder": str(stage.folder),
        }
        for stage, job in zip(stages, jobs, strict=True)
    ]
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    cells = [columns, *([row[name] for name in columns] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(columns))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _read_results(folder: Path) -> dict[str, str]:
    """Return the last results of a run as text; of an evaluation, those of the split."""
    progress = Progress(folder, None)
    progress.read()
    summary = read_summary(folder) or {}
    evaluated = (summary.get(EVALUATIONS) or {}).get("val", {})
    last = progress.last | {f"val/{name}": value for name, value in evaluated.items() if isinstance(value, float)}
    names = {"steps": "step", "train loss": "train/loss", "val loss": "val/loss"}
    names |= {"exact match": "val/exact_match", "reward": "val/reward"}
    if "train/loss" in summary.get("measures", {}):  # of a policy, which it says nothing of
        last.pop("train/loss", None)
    return {title: f"{last[name]:.5g}" if name in last else "" for title, name in names.items()}


def read_state(folder: Path) -> dict[str, Entry]:
    """Return the entries of `pipeline.json` by stage; empty if there is no such file.

    Raises:
        ConfigError: The file is damaged.
    """
    file = folder / PIPELINE_FILE
    if not file.exists():
        return {}
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
        entries = {name: Entry(**entry | {"state": State(entry["state"])}) for name, entry in content["stages"].items()}
        for entry in entries.values():
            if Path(entry.folder).name != entry.folder or not entry.folder:
                raise ValueError("a folder in it is not in that of the pipeline")
            if entry.cluster_job is not None and not CLUSTER_JOB.fullmatch(entry.cluster_job):
                raise ValueError(f"{entry.cluster_job!r} is not a job id")  # it becomes part of a file name
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        fix = f"rm {file}, and every stage runs again; their folders are kept"
        raise ConfigError(f"hydra.run.dir={folder}", f"{file} is damaged: {error}", fix) from error
    return entries
