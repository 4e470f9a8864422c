"""One rank of several that agree on steps, each at a speed of its own: what it did after which step, and when."""

import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[3])]

import torch.distributed as dist  # noqa: E402

from recipes.runtime.step_agreement import StepAgreement  # noqa: E402

EVAL_EVERY = 40
LONG_SECONDS = 5.0  # many meetings fit


def random_requests(
    rank: int, requests: dict[str, list[int]], *, steps: int, rested: int
) -> dict[str, Any]:
    """Train at a speed of one's own; a collective binds fast ranks to slow ones every other step, and the last.

    Requests come from the side, as signals do.
    """
    pace = random.Random(rank)
    agreement = StepAgreement(step=0)
    asked = {step: what for what, (asks, step) in requests.items() if asks == rank}
    done: list[tuple[str, int]] = []
    for step in range(1, steps + 1):
        time.sleep(pace.random() * 0.008 * (rank + 1))
        if step % 2:
            dist.barrier()
        if step in asked:
            threading.Timer(pace.random() * 0.01, agreement.ask, [asked[step]]).start()
        validates = step % EVAL_EVERY == 0
        due = agreement.due(step, resting=validates, wait=step < steps)
        if validates:
            due |= _validate(agreement, step, rests=step == rested, asks=rank == 1)
        done += [(what, step) for what in sorted(due)]
    agreement.close()
    dist.barrier()  # the loop's last: nobody may be left in a meeting
    return {"done": done}


def _validate(agreement: StepAgreement, step: int, *, rests: bool, asks: bool) -> set[str]:
    """Batches without a collective, after each of which the ranks may agree on this very step."""
    due = set()
    if rests and asks:
        agreement.ask("rested")
    until = time.monotonic() + (LONG_SECONDS if rests else 0.01)
    while time.monotonic() < until and "rested" not in due:
        time.sleep(0.02)
        due |= agreement.due(step, resting=True)
    return due | agreement.due(step, resting=False)


def nobody_asks(rank: int) -> dict[str, Any]:
    """A rank begins when the one before it is through with all its steps: nobody waits for anybody."""
    calls = []
    gather = dist.all_gather_object
    dist.all_gather_object = lambda *words, **more: calls.append(gather(*words, **more))
    agreement = StepAgreement(step=0)
    time.sleep(rank * 1.0)  # four looks at the store
    began = time.time()
    for step in range(1, 10_001):
        assert agreement.due(step) == set()
    ended = time.time()
    agreement.close()
    dist.barrier()
    dist.all_gather_object = gather
    return {"began": began, "ended": ended, "collectives": len(calls)}


def around_the_last_step(rank: int, rounds: int) -> dict[str, Any]:
    """Each round a run of three steps, whose last ends about when a request comes; then the next round."""
    pace = random.Random(100 + rank)
    done = []
    for number in range(rounds):
        agreement = StepAgreement(step=0)
        if rank == number % dist.get_world_size():
            threading.Timer(number / rounds * 0.6, agreement.ask, ["stop"]).start()
        for step in (1, 2, 3):
            time.sleep(0.1 + pace.random() * 0.05)
            dist.barrier()
            if "stop" in agreement.due(step, wait=step < 3):
                done.append((number, step))
                break
        agreement.close()
        dist.barrier()
    return {"done": done}


def main() -> None:
    """Carry out every case; rank 0 writes what all ranks have to say."""
    cases = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    mine = {
        "random": random_requests(
            rank, cases["requests"], steps=cases["steps"], rested=cases["rested"]
        ),
        "nobody": nobody_asks(rank),
        "last": around_the_last_step(rank, cases["rounds"]),
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(every))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
