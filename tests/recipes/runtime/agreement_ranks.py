"""One of several ranks that agree on steps, each at its own speed: records what it did after which step, and when."""

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
LONG_SECONDS = 5.0  # enough for many exchanges


def random_requests(
    rank: int, requests: dict[str, list[int]], *, steps: int, long_validation_step: int
) -> dict[str, Any]:
    """Train at a speed of this rank's own; a collective ties fast ranks to slow ones every other step, and the last.

    Requests come from another thread, at any time, as signals do.
    """
    pace = random.Random(rank)
    agreement = StepAgreement(step=0)
    own_requests = {step: what for what, (requester, step) in requests.items() if requester == rank}
    done: list[tuple[str, int]] = []
    for step in range(1, steps + 1):
        time.sleep(pace.random() * 0.008 * (rank + 1))
        if step % 2:
            dist.barrier()
        if step in own_requests:
            threading.Timer(pace.random() * 0.01, agreement.ask, [own_requests[step]]).start()
        validates = step % EVAL_EVERY == 0
        due = agreement.take_due(step, in_validation=validates, wait=step < steps)
        if validates:
            due |= _validate(agreement, step, is_long=step == long_validation_step, requests=rank == 1)
        done += [(what, step) for what in sorted(due)]
    agreement.close()
    dist.barrier()  # like the last of training: no rank may be left in an exchange
    return {"done": done}


def _validate(agreement: StepAgreement, step: int, *, is_long: bool, requests: bool) -> set[str]:
    """Run batches without a collective; after each of them the ranks may agree on this very step."""
    due = set()
    if is_long and requests:
        agreement.ask("during_validation")
    deadline = time.monotonic() + (LONG_SECONDS if is_long else 0.01)
    while time.monotonic() < deadline and "during_validation" not in due:
        time.sleep(0.02)
        due |= agreement.take_due(step, in_validation=True)
    return due | agreement.take_due(step, in_validation=False)


def no_requests(rank: int) -> dict[str, Any]:
    """Begin when the rank before this one has completed all its steps: no rank waits for another."""
    calls = []
    gather = dist.all_gather_object
    dist.all_gather_object = lambda *args, **kwargs: calls.append(gather(*args, **kwargs))
    agreement = StepAgreement(step=0)
    time.sleep(rank * 1.0)  # the thread polls the store four times in it
    began = time.time()
    for step in range(1, 10_001):
        assert agreement.take_due(step) == set()
    ended = time.time()
    agreement.close()
    dist.barrier()
    dist.all_gather_object = gather
    return {"began": began, "ended": ended, "collectives": len(calls)}


def around_the_last_step(rank: int, rounds: int) -> dict[str, Any]:
    """Run rounds of three steps, the last of which ends about when a request comes."""
    pace = random.Random(100 + rank)
    done = []
    for number in range(rounds):
        agreement = StepAgreement(step=0)
        if rank == number % dist.get_world_size():
            threading.Timer(number / rounds * 0.6, agreement.ask, ["stop"]).start()
        for step in (1, 2, 3):
            time.sleep(0.1 + pace.random() * 0.05)
            dist.barrier()
            if "stop" in agreement.take_due(step, wait=step < 3):
                done.append((number, step))
                break
        agreement.close()
        dist.barrier()
    return {"done": done}


def main() -> None:
    """Run every case; rank 0 writes the results of all ranks."""
    cases = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    results = {
        "random": random_requests(
            rank, cases["requests"], steps=cases["steps"], long_validation_step=cases["long_validation_step"]
        ),
        "no_requests": no_requests(rank),
        "last": around_the_last_step(rank, cases["rounds"]),
    }
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, results)
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(gathered))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
