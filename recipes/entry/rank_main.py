"""One rank of a run: takes the composed run from the process or the rank that made it, ends with its starter."""

import faulthandler
import os
from pathlib import Path

from recipes.config.compose import from_json
from recipes.runtime.failure import ERROR_FILE, STACK
from recipes.runtime.process import die_with_parent, exit_process
from recipes.runtime.signals import listen
from recipes.runtime.world import RANK_FILE


def main() -> int:
    """Carry out the run that the parent wrote down; the exit code."""
    listen(second_ends=False)
    from recipes.entry.run import run_composed
    from recipes.runtime.exit_codes import ExitCode

    die_with_parent()
    stack = Path(os.environ[ERROR_FILE]).with_suffix(STACK)
    faulthandler.enable(stack.open("w"), all_threads=False)  # open until the end
    try:
        return run_composed(from_json(Path(os.environ[RANK_FILE]).read_text()))
    except KeyboardInterrupt:  # before the run began or after it ended
        return ExitCode.INTERRUPTED


if __name__ == "__main__":
    exit_process(main())
