"""`plan.hardware=` names a device and how many of them a node has."""

import pytest

from callbacks.throughput.peak_flops import get_peak
from recipes.errors import ConfigError
from recipes.plan.hardware import CONTEXT_BYTES, DEVICES, GIB, LINK_EFFICIENCY, LINKS, find_cluster


def _find(hardware: str, **changed: object) -> object:
    arguments = {"per_node": None, "num_nodes": 1, "interconnect": None, "memory_gib": None}
    return find_cluster(hardware, **(arguments | changed))  # type: ignore[arg-type]


def test_a_device_with_a_count_is_a_node() -> None:
    cluster = _find("h100x8", num_nodes=2)
    assert (cluster.device.name, cluster.per_node, cluster.num_devices) == ("h100", 8, 16)  # type: ignore[attr-defined]
    assert cluster.memory_bytes == 81_559 * 2**20 - CONTEXT_BYTES  # type: ignore[attr-defined]


@pytest.mark.parametrize(("hardware", "count"), [("rtx4090", 1), ("rtx4090x2", 2), ("l4", 1), ("h100x1024", 1024)])
def test_a_name_may_hold_an_x(hardware: str, count: int) -> None:
    assert _find(hardware).num_devices == count  # type: ignore[attr-defined]


def test_more_than_eight_devices_are_several_nodes_unless_the_run_says_otherwise() -> None:
    def nodes(hardware: str, **changed: object) -> tuple[int, int]:
        cluster = _find(hardware, **changed)
        return cluster.per_node, cluster.num_nodes  # type: ignore[attr-defined]

    assert nodes("h100x1024") == (8, 128)
    assert nodes("h100x8", num_nodes=2) == (8, 2)
    assert nodes("a100_40x16", per_node=16) == (16, 1)
    assert nodes("h100x12", per_node=12) == (12, 1)
    assert nodes("h100x12", num_nodes=2) == (6, 2)
    assert nodes("h100x16", num_nodes=2) == (8, 2)


@pytest.mark.parametrize(
    ("hardware", "num_nodes", "fix"),
    [
        ("h100x12", 1, "plan.hardware=h100x16, or trainer.num_nodes=2 for nodes of 6"),
        ("h100x13", 1, "plan.hardware=h100x16"),
        ("h100x18", 4, "plan.hardware=h100x24 trainer.num_nodes=1, or trainer.num_nodes=3 for nodes of 6"),
        ("h100x64", 4, "plan.hardware=h100x64 trainer.num_nodes=1, or trainer.num_nodes=8 for nodes of 8"),
    ],
)
def test_devices_that_make_no_whole_nodes_are_rejected(hardware: str, num_nodes: int, fix: str) -> None:
    with pytest.raises(ConfigError, match="of at most 8 devices") as error:
        _find(hardware, num_nodes=num_nodes)
    assert error.value.fix == fix


def test_the_run_may_ask_for_fewer_devices_and_another_amount_of_memory() -> None:
    cluster = _find("a100_40x8", per_node=4, memory_gib=20.0)
    assert (cluster.num_devices, cluster.memory_bytes) == (4, 20 * GIB - CONTEXT_BYTES)  # type: ignore[attr-defined]


def test_the_memory_of_the_table_typed_by_hand_leaves_as_much_to_tensors() -> None:
    typed = _find("h100", memory_gib=81_559 / 1024)
    assert typed.memory_bytes == _find("h100").memory_bytes  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"the CUDA context alone takes 0\.8 GiB"):
        _find("h100", memory_gib=0.5)


@pytest.mark.parametrize("hardware", ["h1000", "x8", "H100x8", "8xh1000", ""])
def test_an_unknown_device_is_rejected_with_those_that_are_known(hardware: str) -> None:
    with pytest.raises(ConfigError, match=r"plan\.hardware=") as error:
        _find(hardware)
    assert "rtx4090" in error.value.fix


def test_a_number_before_the_device_is_put_behind_it() -> None:
    with pytest.raises(ConfigError, match=r"stands behind their name; type plan\.hardware=h100x8$"):
        _find("8xh100")


@pytest.mark.parametrize("hardware", ["h100x", "h100x0", "h100x-1"])
def test_a_number_of_devices_that_is_none_is_named(hardware: str) -> None:
    with pytest.raises(ConfigError, match="counts its devices") as error:
        _find(hardware)
    assert error.value.fix == "plan.hardware=h100x8"


def test_an_unknown_link_is_rejected_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"plan\.interconnect=string") as error:
        _find("h100x8", interconnect="string")
    assert "ib400" in error.value.fix


def test_ranks_of_a_node_share_its_links_to_the_others() -> None:
    """Eight links of 50 GB/s leave a node: 400 for a group of whole nodes, 50 for one with a rank in each."""
    cluster = find_cluster("h100x32", per_node=None, num_nodes=1, interconnect=None, memory_gib=None)
    rates = [cluster.bandwidth_between(*size, stride=stride) / LINK_EFFICIENCY for size, stride in _GROUPS]
    assert rates == [LINKS["nvlink4"], 8 * LINKS["ib400"], LINKS["ib400"], 2 * LINKS["ib400"], LINKS["ib400"]]


# ranks of a group and the way from one to the next: a node, two nodes, across nodes, every fourth, two far apart
_GROUPS = (((8,), 1), ((16,), 1), ((4,), 8), ((8,), 4), ((2,), 16))


def test_every_device_of_the_table_has_published_peaks_and_a_link() -> None:
    for device in DEVICES.values():
        assert device.full_name is not None
        assert device.link in LINKS
        for kind in ("bf16", "fp16", "fp32"):
            assert get_peak(device.full_name, kind).tflops is not None, (device.name, kind)  # type: ignore[arg-type]
