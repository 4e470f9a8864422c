"""What only two processes show: a random state of each, gloo itself, and a process that ends."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_on_ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what both ranks have found."""
    worker = Path(__file__).with_name("two_ranks.py")
    return run_on_ranks({}, world_size=2, folder=tmp_path_factory.mktemp("ranks"), worker=worker)["ranks"]


@pytest.mark.parametrize("divided", ["tensor", "context"])
def test_ranks_with_parts_of_a_sequence_drop_different_activations(divided: str, results: Any) -> None:
    first, second = (torch.tensor(of_rank[divided]) for of_rank in results)  # [dropouts, B t, W] bool
    assert first.shape == second.shape == (5, 4 * 8, 32)  # of the embedding, and two a block; half of 16 tokens
    for one, other in zip(first, second, strict=True):
        # 1024 activations, dropped with probability 0.5: within six standard deviations of 0.016
        assert float(one.float().mean()) == pytest.approx(0.5, abs=0.1)
        assert float((one == other).float().mean()) == pytest.approx(0.5, abs=0.1)


def test_gloo_exchanges_what_threads_do(results: Any) -> None:
    parts = [torch.arange(8.0).reshape(2, 4) + 100 * rank for rank in range(2)]
    for rank, found in enumerate(results):
        assert found["gathered"] == torch.cat(parts, 1).tolist()
        assert found["scattered"] == sum(parts).chunk(2, 1)[rank].tolist()  # type: ignore[union-attr]
        assert found["exchanged"] == torch.cat([part.chunk(2, 1)[rank] for part in parts]).tolist()
        assert found["largest"] == parts[1].tolist()


def test_a_stage_of_torch_still_keeps_its_shapes_and_another_ends_the_process(results: Any) -> None:
    """2.13, `parallel.schedule.PipelineSchedule`, which has a schedule for each shape."""
    assert int(signal.SIGABRT) in [found["signal"] for found in results]
