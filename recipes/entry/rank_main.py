"""Main program of a spawned rank, which reads the composed run from a file and dies with its parent."""

import faulthandler
import os
from pathlib import Path

from recipes.config.resolved import from_json
from recipes.runtime.failure import ERROR_FILE, STACK_SUFFIX
from recipes.runtime.local_store import serve_local_ranks
from recipes.runtime.process import die_with_parent, exit_process
from recipes.runtime.signals import listen
from recipes.runtime.world import RANK_FILE


def main() -> int:
    """Execute the composed run that the parent has written; return the exit code."""
    # before the slow imports: the parent has blocked the signals until now
    listen(on_second="ignore")
    from recipes.entry.run import run_resolved
    from recipes.runtime.exit_codes import ExitCode

    die_with_parent()
    if os.environ["RANK"] == "0":
        serve_local_ranks()
    stack_file = Path(os.environ[ERROR_FILE]).with_suffix(STACK_SUFFIX)
    faulthandler.enable(stack_file.open("w", encoding="utf-8"), all_threads=False)  # the file stays open
    try:
        return run_resolved(from_json(Path(os.environ[RANK_FILE]).read_text(encoding="utf-8")))
    except KeyboardInterrupt:  # before the run began or after it ended
        return ExitCode.INTERRUPTED


if __name__ == "__main__":
    exit_process(main())
