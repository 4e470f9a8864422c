"""One rank of a run: takes the composed run from the process or the rank that made it, ends with its starter."""

import dataclasses
import faulthandler
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from recipes.compose import Composed
from recipes.failure import ERROR_FILE, STACK
from recipes.leave import leave
from recipes.mistake import Mistake
from recipes.preemption import listen
from recipes.ranks import RANK_FILE, global_rank, started_by

_TELL_SECONDS = 1.0
_STORES: list[object] = []  # a store that rank 0 serves must outlive the function that opens it


def main() -> int:
    """Carry out the run that the parent wrote down; the exit code."""
    listen(second_ends=False)
    from recipes.launch import EXIT_INTERRUPTED, launch

    _end_with_parent()
    stack = Path(os.environ[ERROR_FILE]).with_suffix(STACK)
    faulthandler.enable(stack.open("w"), all_threads=False)  # open until the end
    try:
        return launch(composed_of(Path(os.environ[RANK_FILE]).read_text()))
    except KeyboardInterrupt:  # before the run began or after it ended
        return EXIT_INTERRUPTED


def text_of(composed: Composed) -> str:
    """A composed run as text for another process."""
    fields = dataclasses.asdict(composed) | {"run_folder": str(composed.run_folder)}
    return json.dumps(fields)


def composed_of(text: str) -> Composed:
    """The composed run that another process wrote."""
    fields = json.loads(text)
    return Composed(**fields | {"run_folder": Path(fields["run_folder"])})


def composed_by_rank_zero(
    compose: Callable[[], tuple[Composed | None, Sequence[Mistake]]],
) -> tuple[Composed | None, Sequence[Mistake]]:
    """Compose once for all ranks of torchrun: the folder named by the clock is then the same everywhere.

    Everywhere else every process composes: SLURM's job names the folder.

    Returns:
        As `compose`; on other ranks than 0, None and no mistakes where rank 0 found some.
    """
    if started_by() != "torchrun" or os.environ["WORLD_SIZE"] == "1":
        return compose()
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    rank = global_rank()
    store, _, _ = next(rendezvous("env://", timeout=timedelta(minutes=10)))
    _STORES.append(store)
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"recipes_composed_{start}", store)
    if rank > 0:
        text = store.get("composed").decode()
        if not text:
            time.sleep(_TELL_SECONDS)  # torchrun ends rank 0 as soon as another rank has ended
            return None, []
        return composed_of(text), []
    composed, mistakes = compose()
    store.set("composed", "" if mistakes or composed is None else text_of(composed))
    return composed, mistakes


def _end_with_parent() -> None:
    """End this process when the parent's end of our standard input closes, however the parent died.

    What the parent writes there is the number of a signal that asks to stop: a cluster that signals both of us asks
    once.
    """
    pipe = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def wait() -> None:
        while told := os.read(pipe, 1):
            os.kill(os.getpid(), told[0])  # wakes the main thread, where `raise_signal` would not
        os._exit(1)

    threading.Thread(target=wait, name="end_with_parent", daemon=True).start()


if __name__ == "__main__":
    leave(main())
