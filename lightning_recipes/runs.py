"""Compose, train, load, read and plan runs in this process; overrides are checked before torch is imported.

Nothing of a call stays behind: neither log handlers, nor signal handlers, nor another working directory. Training seeds
the global random number generators, as the command does.
"""

import base64
import contextlib
import copy
import html
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from recipes.config import compose_and_check
from recipes.config.commands import list_classes, repeat_command
from recipes.config.compose import quote_options
from recipes.config.overrides import drop_replaced, for_shell, make_override
from recipes.config.resolved import ResolvedRun
from recipes.config.search_path import select_search_path
from recipes.config.signature import read_signature
from recipes.config.trust import find_resumed_run, recall_typed, remember_typed
from recipes.entry.hydra_main import find_missing_folder
from recipes.entry.light_import import without_unused_packages
from recipes.entry.run import Outcome, run_to_outcome
from recipes.errors import ConfigError, ConfigErrors, format_report, type_command
from recipes.pipeline.main import is_pipeline
from recipes.project import open_project
from recipes.run_folder import (
    CONFIG_FILE,
    EVENTS_FILE,
    EXPORT_RECORD,
    METRICS_FILE,
    PAGE_FILE,
    PICTURE_FILE,
    PLAN_FILE,
    SUMMARY_FILE,
    find_run_folder,
    has_run,
    read_config,
    read_events,
    read_json,
    read_rows,
    read_summary,
)
from recipes.runtime.console import open_console, restoring_console
from recipes.runtime.exit_codes import ExitCode
from recipes.runtime.own_code import describe_error
from recipes.runtime.status import showing_in_cell
from recipes.runtime.torch_variables import find_variables_of_torch
from recipes.runtime.world import find_wrong_variables, started_by
from recipes.sweep.main import is_sweep, reject_settings_of_sweep

from .arguments import check_weights, find_best, find_run, read_overrides
from .edited import reload_edited, remember_imported

if TYPE_CHECKING:
    import pandas
    from torch import nn

Weights = Literal["trained", "best", "ema"]
_COUNTS = ("step", "train/tokens", "train/samples")
_NO_ADVICE = "mode.advise=false"
_PLAN_PAGE = "plan.html"
_PAGE_HEIGHT = "75vh"
_OF_EXPORT = ("hydra.searchpath=", "model.", "task.module.")  # which code a folder may choose
_FOLDER_OF_CODE = re.compile(r"PYTHONPATH=(<[^>]*>|\.(?= ))")
_NOT_LOADED = "The weights cannot be loaded."


class InvalidConfigError(ValueError):
    """Wrong overrides. Its text lists all mistakes as the command line prints them: set, reason, what to type."""


class RunError(RuntimeError):
    """A run has ended before its last step, or could not be saved; the exception that ended it is its cause.

    Attributes:
        exit_code: Exit code of a command that ends so; docs/reference/exit_codes.md lists them.
        folder: Run folder, for `read`.
    """

    def __init__(self, text: str, *, exit_code: int, folder: Path) -> None:
        super().__init__(text)
        self.exit_code = exit_code
        self.folder = folder


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """What a run has written to its folder, as plain data. A notebook shows it as curves and the report.

    Both are of the callback `report`; a notebook says so where there are none since the last start.

    Attributes:
        folder: Run folder.
        rows: Rows of metrics.csv, by metric; each has a `step`, and only the metrics that were logged there.
        events: Lines of events.jsonl; each has `event`, `step` and `time`.
        summary: summary.json; empty if the run has not ended.
        config: config.yaml; empty if the folder has none.
    """

    folder: Path
    rows: list[dict[str, float]] = field(repr=False)
    events: list[dict[str, Any]] = field(repr=False)
    summary: dict[str, Any] = field(repr=False)
    config: dict[str, Any] = field(repr=False)

    def to_pandas(self) -> "pandas.DataFrame":
        """Return the rows as a frame with the step as its index; NaN where a metric was not logged.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas

        frame = pandas.DataFrame(self.rows, columns=list(dict.fromkeys(name for row in self.rows for name in row)))
        return frame.astype({"step": int}).set_index("step") if self.rows else frame

    def load(self, *overrides: str | Sequence[str], weights: Weights = "trained") -> "nn.Module":
        """Return the model with the weights of the newest checkpoint, see `load`."""
        return load(self.folder, *overrides, weights=weights)

    def _repr_html_(self) -> str:
        """Return key figures, curves.png and report.html, each if there is one; the page works without a network."""
        name, status = str(self.config.get("name", self.folder.name)), str(self.summary.get("status", "not ended"))
        shown = [html.escape(f"{name}: {status}")]
        figures = {key: self.summary.get(key) for key in ("steps", "train_loss", "val_loss", "tokens_per_second")}
        shown += [
            html.escape(f"{key.replace('_', ' ')} {f'{value:,}' if isinstance(value, int) else f'{value:,.6g}'}")
            for key, value in figures.items()
            if isinstance(value, int | float)
        ]
        shown.append(f"<code>{html.escape(str(self.folder))}</code>")
        parts = [f"<p>{', '.join(shown)}</p>"]
        picture, page = self.folder / PICTURE_FILE, self.folder / PAGE_FILE
        if not self._has_current(picture) and not self._has_current(page):
            parts.append(f"<p>There is no current {PICTURE_FILE}: the callback <code>report</code> draws it.</p>")
        if self._has_current(picture):
            data = base64.b64encode(picture.read_bytes()).decode()
            parts.append(
                f'<img alt="curves of {html.escape(name)}" style="max-width:100%" src="data:image/png;base64,{data}">'
            )
        if self._has_current(page):
            frame = _embed(page.read_text(encoding="utf-8"))
            parts.append(f"<details><summary>{PAGE_FILE}</summary>{frame}</details>")
        return "\n".join(parts)

    def _has_current(self, file: Path) -> bool:
        """Return whether a file was written since the run has last started: one that resumes may write none."""
        starts = [float(event.get("time", 0)) for event in self.events if event.get("event") in ("start", "resume")]
        return file.is_file() and file.stat().st_mtime >= max(starts, default=0.0)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Predicted memory, time and disk usage of a run. A notebook shows it as the page of `mode=plan`.

    Attributes:
        record: What `mode=plan` writes to plan.json, such as `peak_memory_gib` and `step_seconds`.
        text: What it prints.
    """

    record: dict[str, Any] = field(repr=False)
    text: str
    page: str = field(repr=False)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return _embed(self.page)


class ComposedRun:
    """A composed and checked run that has not started: nothing is built, and no folder is made."""

    def __init__(self, resolved: ResolvedRun) -> None:
        self._resolved = resolved

    @property
    def config(self) -> dict[str, Any]:
        """All settings, as plain values; a copy."""
        return copy.deepcopy(self._resolved.config)

    @property
    def overrides(self) -> list[str]:
        """The overrides that it was composed from; those of a resumed run come first."""
        return list(self._resolved.overrides)

    @property
    def command(self) -> str:
        """The command that trains the same run."""
        typed = self._resolved.typed
        resumed = find_resumed_run(typed)  # of a run that was started here, this process knows the classes
        return repeat_command([*typed, *(list_classes(resumed, typed) if resumed is not None else ())])

    def fit(self) -> RecordedRun:
        """Train in this process, or with several ranks in one new process per rank; return what the run has written.

        Progress goes to the standard output, a line per logged step, and a bar on a terminal.

        Returns:
            The finished run.

        Raises:
            InvalidConfigError: The data, the checkpoint or the machine does not fit the config.
            RunError: The run has ended early; its folder is in the exception.
            KeyboardInterrupt: Ctrl-C, or the kernel was interrupted: the first one finishes the step and saves, a
                second one ends the run where it is.
        """
        if (mistake := self._find_refusal()) is not None:
            raise InvalidConfigError(format_report([mistake], "This run cannot be trained from Python."))
        with _reporting_mistakes():
            reload_edited()
        with restoring_console():
            outcome = run_to_outcome(self._resolved, shows_errors=False, on_second="raise")
        remember_imported()
        remember_typed(outcome.run_folder, self._resolved.typed)
        _raise_unless_finished(outcome)
        return read(outcome.run_folder)

    def _find_refusal(self) -> ConfigError | None:
        """Return why only the command can do what this run is."""
        resolved = self._resolved
        if (starter := started_by()) is not None and resolved.ranks.world_size > 1:
            reason = f"{starter} has started this program once per rank, and all ranks have to agree on one run folder"
            return ConfigError(f"fit() under {starter}", reason, f"{starter} … {self.command.removeprefix('python ')}")
        if resolved.runs_elsewhere:
            setting = f"launcher={resolved.choices.get('launcher')}"
            return ConfigError(setting, "it submits a command to a cluster, and fit() trains here", self.command)
        if not resolved.mode.trains:
            return ConfigError(
                f"mode={resolved.mode.name}", "it does not train, which is all that fit() does", self.command
            )
        return None

    def __repr__(self) -> str:
        return f"ComposedRun({', '.join(map(repr, self._resolved.typed))})"


def compose(*overrides: str | Sequence[str], **settings: object) -> ComposedRun:
    """Compose a run and check it; builds nothing, creates no folder, and takes a second.

    Args:
        overrides: As on the command line, each a text, or lists of them.
        settings: None: an error has the override.

    Raises:
        InvalidConfigError: Some are wrong; its text lists all mistakes.

    Example:
        >>> import lightning_recipes as lr
        >>> run = lr.compose("recipe=single_fp32", "model=llama_nano", "trainer.max_steps=10")
        >>> run.config["trainer"]["max_steps"], run.config["precision"]["name"]
        (10, '32-true')
        >>> lr.compose("model=lama_nano")
        Traceback (most recent call last):
        ...
        lightning_recipes.runs.InvalidConfigError: The config has 1 mistake; nothing was built.
        ...
           type: model=llama_nano
    """
    return ComposedRun(_compose(_read_overrides("compose", overrides, settings)))


def load(run: "str | Path | RecordedRun", *overrides: str | Sequence[str], weights: Weights = "trained") -> "nn.Module":
    """Return the model of a run with the weights of its newest valid checkpoint, in eval mode, on the CPU.

    Or the model of an export, from its files alone. Of a run of task=lightning, the LightningModule itself. Unless it
    has an attribute `tokenizer` of its own, that is the tokenizer of the run; None if its data is not text. Neither the
    data of the run nor its class need be there. Neither the random number generators nor the precision of float32
    products change.

    Args:
        run: Run folder, a checkpoint in it, a folder that `mode=export` has written, or what `fit` or `read` returns.
        overrides: As on the command line: `hydra.searchpath=[…]` for a run with options from there, or
            `trainer.accelerator=gpu` to load the weights on a GPU. A folder may not choose code of its own: for an
            export of a class that no option names, `model._target_=<module.Class>`.
        weights: `trained`; `best` for those of the best checkpoint instead of the newest; or `ema` for the moving
            average of a run with `ema_decay`.

    Raises:
        InvalidConfigError: There is no run, no valid checkpoint in it, or no average; or an export that cannot be
            loaded.

    Example:
        >>> import lightning_recipes as lr
        >>> text = ["data=text_files", "data.path=my_texts", "tokenizer=bytes", "model.vocab_size=257"]
        >>> run = lr.compose(*text, "trainer.max_steps=2", "warmup_steps=0", "callbacks=[]", "hydra.run.dir=mine").fit()
        quickstart: run folder mine
        ...
        >>> model = lr.load("mine")
        >>> model.training, model.tokenizer.encode("abc")
        (False, [97, 98, 99])
    """
    with _reporting_mistakes(_NOT_LOADED):
        check_weights(weights)
        path = find_run("load", run)
    words = _read_overrides("load", overrides)
    if (path / EXPORT_RECORD).is_file():
        return _load_export(path, words, weights)
    if weights == "best":
        with _reporting_mistakes(_NOT_LOADED):
            path = find_best(path)
    typed = ["mode=evaluate", *words, make_override("resume", str(path))]
    resolved = _compose(typed, only_weights=True)
    if not any(word.lstrip("+").startswith("trainer.accelerator=") for word in words):
        resolved = resolved.with_settings({"trainer.accelerator": "cpu", "trainer.devices": 1, "compile": False})
    with _quietly():
        with without_unused_packages(resolved.list_targets()):
            from recipes.build import build
        from lightning.pytorch.utilities.seed import isolate_rng

        from recipes.mode.load import load_task, load_tokenizer
        from recipes.mode.own_module import release

        with _reporting_mistakes(), isolate_rng(), _keeping_float32_products():
            built = build(resolved)
            task, _ = load_task(built, "ema" if weights == "ema" else "trained")
            model = release(task) if built.has_own_training else task.model
            tokenizer = load_tokenizer(built, "load") if built.tokenizer_folder.is_dir() else None
    return _with_tokenizer(model, tokenizer)


def _load_export(folder: Path, overrides: Sequence[str], weights: Weights) -> "nn.Module":
    """Return the model of an export.

    Raises:
        InvalidConfigError: It is damaged, names a class that it may not choose, or holds no module.
    """
    shown = f"load({str(folder)!r})"
    others = [text for text in overrides if not text.lstrip("+").startswith(_OF_EXPORT)]
    if others or weights != "trained":
        typed = others[0] if others else f"weights={weights!r}"
        reason = "an export has one set of weights, on the CPU"
        raise InvalidConfigError(format_report([ConfigError(typed, reason, f"{shown} without {typed}")], _NOT_LOADED))
    with _quietly(), _reporting_mistakes(_NOT_LOADED):
        from lightning.pytorch.utilities.seed import isolate_rng

        from recipes.mode.export.record import load_export

        with isolate_rng():
            model, tokenizer = load_export(folder, [*open_project(overrides), *overrides], shown=shown)
    return _with_tokenizer(model, tokenizer)


def _with_tokenizer(model: Any, tokenizer: object) -> "nn.Module":
    """Return a model with an attribute `tokenizer`; one of its own stays."""
    if not hasattr(model, "tokenizer"):
        model.tokenizer = tokenizer
    loaded: nn.Module = model
    return loaded


def read(run: str | Path | RecordedRun) -> RecordedRun:
    """Read what a run has written, while it is running or after it has ended; imports no torch.

    Args:
        run: Run folder, a checkpoint in it, or a run that was read before.

    Raises:
        InvalidConfigError: There is no run, or one of its files is damaged.

    Example:
        >>> import lightning_recipes as lr
        >>> lr.read("nothing")
        Traceback (most recent call last):
        ...
        lightning_recipes.runs.InvalidConfigError: The run cannot be read.
        ...
        1. read('nothing')
           there is no such folder
           type: read(<a run folder>)
    """
    with _reporting_mistakes("The run cannot be read."):
        typed = find_run("read", run)
        folder = find_run_folder(typed) or typed
        if not has_run(folder) and not any((folder / name).is_file() for name in (METRICS_FILE, SUMMARY_FILE)):
            example = "a run folder, such as logs/quickstart/2026-01-31_12-00-00"
            raise ConfigError(f"read({str(typed)!r})", "there is no run in this folder", f"read(<{example}>)")
        return RecordedRun(
            folder=folder,
            rows=[*map(_with_counts, read_rows(folder / METRICS_FILE))],
            events=read_events(folder / EVENTS_FILE),
            summary=read_summary(folder) or {},
            config=read_config(folder) if (folder / CONFIG_FILE).is_file() else {},
        )


def _with_counts(row: dict[str, float]) -> dict[str, float]:
    """Return a row with counts as whole numbers."""
    return {name: int(value) if name in _COUNTS and value.is_integer() else value for name, value in row.items()}


def plan(*overrides: str | Sequence[str], **settings: object) -> Plan:
    """Predict memory, time and disk usage of a run; trains nothing, and needs no GPU.

    It takes up to a minute, because it also plans variations of the run for its advice, and says which; without, some
    seconds.

    Args:
        overrides: As on the command line; `plan.hardware=h100x8` names GPUs, `mode.advise=false` is faster.
        settings: None: an error has the override.

    Raises:
        InvalidConfigError: Some overrides are wrong; its text lists all mistakes.

    Example:
        >>> import lightning_recipes as lr
        >>> plan = lr.plan("recipe=fsdp_bf16", "model=gpt2_nano", "plan.hardware=h100x8", "mode.advise=false")
        >>> plan.record["num_parameters"], plan.record["peak_memory_gib"] < 80
        (1752768, True)
    """
    words = _read_overrides("plan", overrides, settings)
    if (typed := next((word for word in words if word.startswith("mode=")), "mode=plan")) != "mode=plan":
        mistake = ConfigError(typed, "plan() has a mode of its own", f"plan() without {typed}")
        raise InvalidConfigError(format_report([mistake]))
    with tempfile.TemporaryDirectory(prefix="recipes_plan_") as temporary:
        resolved = _compose(["mode=plan", make_override("mode.path", temporary), *words])
        if _NO_ADVICE not in words:
            print("plan: with variations of the run for its advice; mode.advise=false takes seconds", file=sys.stderr)
        printed = io.StringIO()
        shown = showing_in_cell("plan", "loading torch")
        with shown, restoring_console(), contextlib.redirect_stdout(printed):
            outcome = run_to_outcome(resolved, shows_errors=False, on_second="raise")
        _raise_unless_finished(outcome)
        folder = Path(os.path.expanduser(resolved.config["mode"]["path"] or temporary))
        page = folder / _PLAN_PAGE
        lines = [line for line in printed.getvalue().splitlines() if line != str(page)]
        with _reporting_mistakes():
            record = read_json(folder / PLAN_FILE, fix="the same call again")
        return Plan(record=record, text="\n".join(lines), page=page.read_text(encoding="utf-8"))


def _read_overrides(
    call: str, arguments: tuple[object, ...], settings: Mapping[str, object] = MappingProxyType({})
) -> list[str]:
    with _reporting_mistakes():
        return read_overrides(call, arguments, settings)


def _compose(overrides: Sequence[str], *, only_weights: bool = False) -> ResolvedRun:
    """Compose and check what train.py would.

    Args:
        overrides: As on the command line.
        only_weights: Whether nothing but weights is loaded, see `compose_and_check`.
    """
    read_signature.cache_clear()  # one's own classes may have been edited since the last call
    with _reporting_mistakes():
        reload_edited()
    of_project, recalled = open_project(overrides), select_search_path(recall_typed(overrides))
    paths = [] if select_search_path(overrides) else recalled or of_project
    words = quote_options(drop_replaced([*paths, *overrides]))
    mistakes = [*find_missing_folder(), *find_wrong_variables(), *find_variables_of_torch()]
    if is_pipeline(words):
        typed = next(word for word in words if is_pipeline([word]))
        command = type_command(" ".join(map(for_shell, words)))
        mistakes.append(ConfigError(typed, "a call takes the overrides of one run, and a pipeline is several", command))
    elif is_sweep(words) or (flags := [word for word in words if word.startswith("-")]):
        typed = next((word for word in words if word.startswith(("sweep=", "hydra.mode="))), "") or flags[0]
        command = type_command(" ".join(map(for_shell, words)))
        mistakes.append(ConfigError(typed, "a call takes the overrides of one run, without flags", command))
    resolved: ResolvedRun | None = None
    if not mistakes:
        resolved, found = compose_and_check(words, only_weights=only_weights)
        mistakes = [*reject_settings_of_sweep(words), *found]
    if mistakes or resolved is None:
        raise InvalidConfigError(format_report([*map(_in_python, mistakes)]))
    return resolved


def _in_python(mistake: ConfigError) -> ConfigError:
    """Return a mistake with what helps in a program, where no variable is set before a command."""
    if not (found := _FOLDER_OF_CODE.match(mistake.fix)):
        return mistake
    words = ", ".join(repr(word) for word in shlex.split(mistake.fix.replace(found[0], "")) if word.startswith("++"))
    fix = f'sys.path.insert(0, "{found[1]}"), and the same call{words and f" with {words} if you trust it"}'
    fix += "".join(mistake.fix.partition(", or pip ")[1:])
    return ConfigError(mistake.setting, mistake.reason, fix)


def _raise_unless_finished(outcome: Outcome) -> None:
    """Raise what a command prints and returns as its exit code."""
    if outcome.exit_code == ExitCode.FINISHED:
        return
    if outcome.exit_code == ExitCode.INTERRUPTED or isinstance(outcome.error, KeyboardInterrupt):
        raise outcome.error or KeyboardInterrupt
    if outcome.exit_code == ExitCode.INVALID_CONFIG:
        raise InvalidConfigError(outcome.report or "The config is invalid.") from outcome.error
    code, folder = ExitCode(outcome.exit_code), outcome.run_folder
    ended = code.name.lower().replace("_", " ")
    # of ranks in processes of their own there is the report alone, which ends with the same line
    last_line = (outcome.report or "").strip().rpartition("\n")[2]
    reason = last_line if outcome.error is None else describe_error(outcome.error)
    text = f"the run has ended: {ended}{f', {reason}' if reason else ''}; its log is {folder / 'train.log'}"
    raise RunError(text, exit_code=code, folder=folder) from outcome.error


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Show nothing but warnings of what is built here."""
    with restoring_console():
        open_console(None, speaks=False)
        yield


@contextlib.contextmanager
def _reporting_mistakes(head: str | None = None) -> Iterator[None]:
    try:
        yield
    except ConfigErrors as error:
        raise InvalidConfigError(format_report(error.mistakes, head)) from error
    except ConfigError as mistake:
        mistake = ConfigError(*(text.replace("mode.weights=", "weights=") for text in mistake.args))
        raise InvalidConfigError(format_report([mistake], head)) from mistake


@contextlib.contextmanager
def _keeping_float32_products() -> Iterator[None]:
    """Keep whether float32 products use TF32, which building a run sets for the whole process."""
    import torch

    cudnn: Any = torch.backends.cudnn
    places: list[Any] = [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn]
    before = [place.fp32_precision for place in places]
    try:
        yield
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision


def _embed(page: str) -> str:
    """Return a page as a part of a notebook: in a frame of its own, whose scripts reach nothing outside of it."""
    return (
        f'<iframe sandbox="allow-scripts" style="width:100%;height:{_PAGE_HEIGHT};border:0"'
        f' srcdoc="{html.escape(page)}"></iframe>'
    )
