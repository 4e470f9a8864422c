"""Run each check in a separate process, with a time limit per check and overall: a failure never stops the others."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gpu_checks.check import Check, Outcome, Settings

ROOT = Path(__file__).parents[2]
OUTCOME_FILE, LOG_FILE = "outcome.json", "check.log"
LEFT_OUT = "left out"  # start of the note for checks that did not fit into the total time
_NUM_LAST_LINES = 12
_LEAST_SECONDS = 10.0  # with less time left, starting a check is not worthwhile

Command = Callable[[Check, Settings], list[str]]


def run_checks(
    checks: Sequence[Check],
    settings: Settings,
    *,
    total_seconds: float,
    command: Command,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[Check, Outcome]]:
    """Run checks one after the other, and yield each with its outcome.

    Args:
        checks: Checks in the order to run.
        settings: Each check gets a subfolder of `folder`, deleted if it passes.
        total_seconds: Time limit for all checks; those that do not fit are skipped with a note.
        command: Returns the command that runs one check.
        clock: Returns the current time in seconds.
    """
    ends = clock() + total_seconds
    for check in checks:
        left = ends - clock()
        if left < _LEAST_SECONDS:
            note = f"{LEFT_OUT}: the {total_seconds:.0f} s of all checks are used up"
            yield check, Outcome(verdict="skipped", note=note)
            continue
        # a comma in the folder name would turn hydra.run.dir into a sweep
        of_check = replace(settings, folder=settings.folder / re.sub(r"\W+", "_", check.name))
        of_check.folder.mkdir(parents=True)
        began = clock()
        of_check_seconds = settings.limit(check.limit_seconds)
        limit_seconds = min(of_check_seconds, left)
        # models this small run fastest on one thread
        environ = os.environ | ({"OMP_NUM_THREADS": "1"} if settings.accelerator == "cpu" else {})
        outcome = run_alone(command(check, of_check), of_check.folder, limit_seconds=limit_seconds, environ=environ)
        if outcome is None and limit_seconds < of_check_seconds:
            note = f"{LEFT_OUT}: ended after {limit_seconds:.0f} s, when the {total_seconds:.0f} s of all were used up"
            outcome = Outcome(verdict="skipped", note=note)
        elif outcome is None:
            last = _read_last_lines(of_check.folder)
            outcome = Outcome(verdict="fail", note=f"ended after its {limit_seconds:.0f} s; its last lines: {last}")
        if outcome.verdict == "pass":
            shutil.rmtree(of_check.folder, ignore_errors=True)  # checkpoints are large
        yield check, replace(outcome, seconds=round(clock() - began, 3))


def run_alone(
    command: Sequence[str], folder: Path, *, limit_seconds: float, environ: Mapping[str, str] = os.environ
) -> Outcome | None:
    """Run a command that writes an outcome into a folder; all its processes have ended on return.

    Args:
        command: Program and arguments.
        folder: Folder for the outcome and the command's output.
        limit_seconds: Time after which its processes are killed.
        environ: Environment variables.

    Returns:
        The outcome; a failure with the last output lines if none was written; None on a timeout.
    """
    with (folder / LOG_FILE).open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # includes its child processes
            process.wait()
    if code == 0 and (folder / OUTCOME_FILE).is_file():
        return Outcome.from_json((folder / OUTCOME_FILE).read_text())
    ended = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    return Outcome(verdict="fail", note=f"{ended}; its last lines: {_read_last_lines(folder)}")


def _read_last_lines(folder: Path) -> str:
    lines = (folder / LOG_FILE).read_text(errors="replace").splitlines()
    return hide_paths("\n".join(lines[-_NUM_LAST_LINES:]), folder)


def hide_paths(text: str, folder: Path) -> str:
    """Remove this machine's folders from a text, because results are published."""
    names = {folder: "<folder>", ROOT: ".", Path(sys.prefix): "<environment>", Path.home(): "~"}
    forms = {form: shown for path, shown in names.items() for form in (str(path), str(path.resolve()))}
    for form in sorted(forms, key=len, reverse=True):  # longest first, because folders may be nested
        text = text.replace(form, forms[form])
    return text
