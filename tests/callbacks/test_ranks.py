"""The collectives of callbacks/ranks.py on two ranks, and without a process group."""

import multiprocessing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from callbacks.ranks import (
    all_ranks,
    gather_objects,
    gather_values,
    max_over_ranks,
    mean_over_ranks,
    num_ranks,
)

CPU = torch.device("cpu")


def call_all(rank: int) -> list[Any]:
    """Call each collective once with values that depend on the rank."""
    return [
        num_ranks(),
        max_over_ranks({"a": 1.0 + rank, "b": 5.0 - rank}, CPU),
        all_ranks(True, CPU),
        all_ranks(rank == 0, CPU),
        float(mean_over_ranks(torch.tensor(2.0 * rank))),
        gather_values([float(rank), 10.0 + rank], CPU),
        gather_objects({"rank": rank}),
    ]


def _run_rank(rank: int, store: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    results.put(call_all(rank))
    dist.destroy_process_group()


def test_without_a_process_group_each_returns_its_own_value() -> None:
    assert call_all(0) == [
        1,
        {"a": 1.0, "b": 5.0},
        True,
        True,
        0.0,
        [[0.0, 10.0]],
        [{"rank": 0}],
    ]


def test_two_ranks_get_the_same_results(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    store = str(tmp_path / "store")
    ranks = [context.Process(target=_run_rank, args=(rank, store, results)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    found = [results.get(timeout=60) for _ in ranks]
    for rank in ranks:
        rank.join()
    expected = [
        2,
        {"a": 2.0, "b": 5.0},
        True,
        False,
        1.0,
        [[0.0, 10.0], [1.0, 11.0]],
        [{"rank": 0}, {"rank": 1}],
    ]
    assert found == [expected] * 2
