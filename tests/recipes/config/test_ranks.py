"""A run that goes to a cluster is checked for the nodes and GPUs of the cluster, not for those of the login node."""

import pytest

from recipes.config import compose_and_check

ON_TWO_NODES = ("recipe=fsdp_bf16", "model=llama_8b", "trainer.devices=8", "trainer.num_nodes=2")


def mistakes_of(*overrides: str) -> list[str]:
    return [str(mistake) for mistake in compose_and_check(overrides)[1]]


@pytest.mark.parametrize("num_gpus", [0, 1, 4])
def test_the_login_node_of_a_cluster_need_not_have_its_gpus(num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.config.ranks.num_gpus", lambda: num_gpus)
    assert mistakes_of("launcher=slurm", *ON_TWO_NODES) == []
    here = mistakes_of(*ON_TWO_NODES)
    assert here, "without a launcher the run is one of this machine"


def test_the_batch_is_checked_against_the_ranks_of_the_cluster() -> None:
    [mistake] = mistakes_of("launcher=slurm", *ON_TWO_NODES, "global_batch_size=24")
    assert mistake.startswith("global_batch_size=24: 24 samples do not divide evenly into 16 devices")


def test_the_ranks_of_a_machine_without_gpus_are_limited_by_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.config.ranks.num_gpus", lambda: 0)
    monkeypatch.setattr("recipes.config.ranks.os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert mistakes_of("strategy=ddp", "trainer.devices=16", "global_batch_size=16") == []
    assert mistakes_of("strategy=ddp", "trainer.devices=200", "global_batch_size=200") == [
        "trainer.devices=200: there is no GPU for these ranks, and 2 cores for that many processes, of which 16 may be"
        " started; type trainer.devices=10"
    ]
