"""Three real processes at different speeds agree on steps, and wait for each other only after a request."""

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
from ranks import run_on_ranks

from recipes.runtime.step_agreement import StepAgreement

WORKER = Path(__file__).parent / "agreement_ranks.py"
ROUNDS = 6
STEPS = 301
LONG_VALIDATION_STEP = 80  # its validation is long, and rank 1 makes a request during it
_CHOICE = random.Random(0)
# what: (rank that requests it, in which step)
REQUESTS = {
    f"request_{number}": (_CHOICE.randrange(3), step)
    for number, step in enumerate(sorted(_CHOICE.sample(range(1, STEPS + 1), 40)))
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run all cases on three ranks and return what each rank did."""
    counts = {"rounds": ROUNDS, "steps": STEPS, "long_validation_step": LONG_VALIDATION_STEP}
    folder = tmp_path_factory.mktemp("agreement")
    return run_on_ranks(
        counts | {"requests": REQUESTS}, world_size=3, folder=folder, worker=WORKER, timeout_seconds=120
    )


def test_all_ranks_act_on_each_request_once_and_after_the_same_step(ranks: Any) -> None:
    first, *others = (rank["random"]["done"] for rank in ranks)
    assert others == [first, first]
    done = dict(first)
    assert len(done) == len(first)
    del done["during_validation"]
    assert all(step >= REQUESTS[what][1] for what, step in done.items())
    # in the last 100 steps, about a second, a request may come too late
    assert set(done) >= {what for what, (_, step) in REQUESTS.items() if step < STEPS - 100}


def test_ranks_in_a_validation_agree_on_the_step_before_it(ranks: Any) -> None:
    for rank in ranks:
        assert ["during_validation", LONG_VALIDATION_STEP] in rank["random"]["done"]


def test_ten_thousand_steps_without_a_request_wait_for_no_rank_and_call_no_collective(
    ranks: Any,
) -> None:
    results = [rank["no_requests"] for rank in ranks]
    assert [rank["collectives"] for rank in results] == [0, 0, 0]
    for earlier, later in itertools.pairwise(results):
        # ranks start one second apart: each finishes its 10,000 steps before the next one begins
        assert earlier["ended"] < later["began"]


def test_a_request_around_the_last_step_is_due_on_all_ranks_or_on_none(ranks: Any) -> None:
    first, *others = (rank["last"]["done"] for rank in ranks)
    assert others == [first, first]
    # the request comes in time in the first rounds, and too late in the last ones
    assert 0 < len(first) < ROUNDS


def test_a_single_process_gets_a_request_at_once_and_only_once() -> None:
    agreement = StepAgreement(step=4)
    assert agreement.take_due(5) == set()
    agreement.ask("save")
    agreement.ask("stop")
    agreement.ask("save")
    assert agreement.take_due(6, in_validation=True) == {"save", "stop"}
    assert agreement.take_due(6) == set()


def test_a_request_repeated_before_the_slower_rank_reaches_the_agreed_step_is_due_once_on_both() -> None:
    # rank 0 asks by its clock after every step until it has saved; rank 1 is one step ahead and has saved already
    slow, fast = StepAgreement(step=3), StepAgreement(step=3)
    slow._alone = fast._alone = False  # no real process group: the test calls `_agree` itself
    # inf: after every check within the step's validation
    end_of = {step: (step, math.inf) for step in range(3, 8)}
    for rank in (slow, fast):
        rank._agree([(end_of[3], ["save"]), (end_of[3], [])])
    assert fast.take_due(4) == {"save"}
    for rank in (slow, fast):
        rank._agree([(end_of[3], ["save"]), (end_of[4], [])])
    assert slow.take_due(4) == {"save"}
    assert (slow.take_due(5), fast.take_due(5)) == (set(), set())
    # once both have passed it, the same request is a new one
    for rank in (slow, fast):
        rank._agree([(end_of[5], ["save"]), (end_of[6], [])])
    assert (slow.take_due(6), fast.take_due(6)) == (set(), set())
    assert (slow.take_due(7), fast.take_due(7)) == ({"save"}, {"save"})


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks_at_their_own_pace_act_on_repeated_requests_after_the_same_steps(num_ranks: int) -> None:
    for seed in range(200):
        first, *others = _simulate(random.Random(seed), num_ranks)
        assert others == [first] * (num_ranks - 1), seed
        assert first


def _simulate(rng: random.Random, num_ranks: int) -> list[list[tuple[str, int]]]:
    """Let ranks, at most three steps apart, request at random; return what each did, and after which step."""
    ranks = [StepAgreement(step=0) for _ in range(num_ranks)]
    for rank in ranks:
        rank._alone = False  # no real process group: the test calls `_agree` itself
    done: list[list[tuple[str, int]]] = [[] for _ in ranks]
    requested: list[set[str]] = [set() for _ in ranks]
    completed = [0] * num_ranks

    def advance(rank: int) -> None:
        if completed[rank] == 25 or completed[rank] - min(completed) == 3:
            return
        completed[rank] += 1
        due = sorted(ranks[rank].take_due(completed[rank]))
        done[rank] += [(what, completed[rank]) for what in due]
        if rng.random() < 0.4:
            requested[rank].add(rng.choice("ab"))

    while min(completed) < 25:
        advance(rng.randrange(num_ranks))
        if rng.random() < 0.35 and any(requested):
            gathered = {}
            for rank in rng.sample(range(num_ranks), num_ranks):
                gathered[rank] = (ranks[rank]._checked, sorted(requested[rank]))
                requested[rank] = set()
                for other in set(range(num_ranks)) - set(gathered):  # it has not joined the exchange yet
                    advance(other)
            for agreement in ranks:
                agreement._agree([gathered[rank] for rank in range(num_ranks)])
    return done
