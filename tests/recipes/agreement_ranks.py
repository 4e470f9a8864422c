"""One rank of several that agree on steps, each at a speed of its own: what it did after which step, and in how long."""

import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from recipes.agreement import StepAgreement

STEPS, EVAL_EVERY = 300, 40
RESTED_STEP = 80  # asked for in the validation after it
LONG = 2.0  # seconds: several meetings fit


def random_requests(rank: int, requests: dict[str, list[list[Any]]]) -> dict[str, Any]:
    """Train as the loop does: a step ends with a collective, which binds fast ranks to slow ones or, every other
    step, does not. Requests come from the side, as signals do."""
    pace = random.Random(rank)
    agreement = StepAgreement(step=0)
    asked = dict(requests[str(rank)])
    done: list[tuple[str, int]] = []
    for step in range(1, STEPS + 1):
        time.sleep(pace.random() * 0.004 * (rank + 1))
        if step % 2:
            dist.barrier()
        if step in asked:
            threading.Timer(pace.random() * 0.01, agreement.ask, [asked[step]]).start()
        validates = step % EVAL_EVERY == 0
        due = agreement.due(step, resting=validates, wait=step < STEPS)
        if validates:
            due |= _validate(agreement, step, ask=rank == 1 and step == RESTED_STEP)
        done += [(what, step) for what in sorted(due)]
    agreement.close()
    dist.barrier()  # the loop's last: nobody may be left in a meeting
    return {"done": done}


def _validate(agreement: StepAgreement, step: int, *, ask: bool) -> set[str]:
    """Batches without a collective, after each of which the ranks may agree on this very step."""
    due = set()
    if ask:
        agreement.ask("rested")
    until = time.monotonic() + (LONG if step == RESTED_STEP else 0.01)
    while time.monotonic() < until and "rested" not in due:
        time.sleep(0.02)
        due |= agreement.due(step, resting=True)
    return due | agreement.due(step, resting=False)


def nobody_asks(rank: int) -> dict[str, Any]:
    """Rank 0 is through with all its steps before the others begin: nobody waits for anybody."""
    group_calls = []
    gather = dist.all_gather_object
    dist.all_gather_object = lambda *words, **more: (group_calls.append(1), gather(*words, **more))
    agreement = StepAgreement(step=0)
    time.sleep(rank * 1.0)
    began = time.perf_counter()
    for step in range(1, 10_001):
        assert agreement.due(step) == set()
    seconds = time.perf_counter() - began
    agreement.close()
    ended_at = time.time()
    dist.barrier()
    dist.all_gather_object = gather
    return {"seconds": seconds, "ended_at": ended_at, "group_calls": len(group_calls)}


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
        "random": random_requests(rank, cases["requests"]),
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
