"""One rank of a run: takes the composed run from the process or the rank that made it, ends with its starter."""

import dataclasses
import faulthandler
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from recipes.compose import Composed
from recipes.end_with_parent import end_with_parent
from recipes.failure import ERROR_FILE, STACK
from recipes.leave import leave
from recipes.mistake import Mistake
from recipes.preemption import listen
from recipes.ranks import RANK_FILE, global_rank, started_by

_TELL_SECONDS = 1.0
_BEGUN = "recipes_begun"  # in the store of torchrun's agent: the run as it was composed first


def main() -> int:
    """Carry out the run that the parent wrote down; the exit code."""
    listen(second_ends=False)
    from recipes.launch import EXIT_INTERRUPTED, launch

    end_with_parent()
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
    """Compose once for all ranks of torchrun, and for all times that it starts them.

    The folder named by the clock is then the same everywhere, and a restart goes on in it, from its newest whole
    checkpoint. Everywhere else every process composes: SLURM's job names the folder.

    Returns:
        As `compose`; on other ranks than 0, None and no mistakes where rank 0 found some.
    """
    if started_by() != "torchrun" or not (_has_peers() or _may_be_restarted()):
        return compose()
    from recipes.meeting import hear, meet_at, store_of_this_start, tell, torchruns_store

    store = torchruns_store()
    if (rank := global_rank()) > 0:
        told = json.loads(hear(store, rank=rank))
        if told["composed"] is None:
            time.sleep(_TELL_SECONDS)  # torchrun ends rank 0 as soon as another rank has ended
            return None, []
        meet_at(told["port"])
        return composed_of(told["composed"]), []
    composed, mistakes = (_begun(store), []) if store.check([_BEGUN]) else compose()
    text = None if mistakes or composed is None else text_of(composed)
    port = store_of_this_start()
    word = json.dumps({"composed": text, "port": port})
    tell(store, word, world_size=int(os.environ["WORLD_SIZE"]))
    if text is not None and port is not None:  # the agent's store is still there at a restart
        store.set(_BEGUN, text)
    meet_at(port)
    return composed, mistakes


def _has_peers() -> bool:
    return os.environ["WORLD_SIZE"] != "1"


def _may_be_restarted() -> bool:
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def _begun(store: Any) -> Composed:
    """The run that torchrun has started before; it goes on, where a start from nothing would be refused."""
    composed = composed_of(store.get(_BEGUN).decode())
    if composed.config["resume"] is None:
        composed.config["resume"] = "auto"
    print(
        "Started again by torchrun: from the newest whole checkpoint, if there is one", flush=True
    )
    return composed


if __name__ == "__main__":
    leave(main())
