"""Devices known to the planner: memory, bandwidth, links. Peak FLOP/s are in the throughput callback's table.

Memory is what the driver reports (nvidia-smi; thundergolfer.com/blog/nvidia-gpu-memory-capacity lists most), bandwidth
and links are those of the vendor's data sheets, in one direction.
"""

import math
import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path

import torch

from recipes.errors import ConfigError

GIB = 2**30
AUTO, MEASURED = "auto", "measured"  # this machine; the second also times its operators
# the CUDA context, cuBLAS and NCCL workspaces take 0.5 to 1 GiB outside the allocator
CONTEXT_BYTES = int(0.8 * GIB)
_CGROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of device.

    Attributes:
        name: Name in `plan.hardware=`.
        full_name: Name reported by torch, the key of the table of peaks; None for a CPU.
        memory_bytes: Memory reported by the driver.
        bandwidth: Memory bandwidth, bytes per second.
        link: Name of the link to the other devices of a node.
    """

    name: str
    full_name: str | None
    memory_bytes: int
    bandwidth: float | None
    link: str

    @property
    def context_bytes(self) -> int:
        """Memory that no tensor can use: the CUDA context, and workspaces outside the allocator."""
        return CONTEXT_BYTES if self.full_name is not None else 0


def _gpu(name: str, full_name: str, *, mib: int, gb_per_second: float, link: str) -> Device:
    return Device(name=name, full_name=full_name, memory_bytes=mib * 2**20, bandwidth=gb_per_second * 1e9, link=link)


DEVICES = {
    device.name: device
    for device in (
        _gpu("a100_40", "NVIDIA A100-SXM4-40GB", mib=40_960, gb_per_second=1555, link="nvlink3"),
        _gpu("a100_80", "NVIDIA A100-SXM4-80GB", mib=81_920, gb_per_second=2039, link="nvlink3"),
        _gpu("b200", "NVIDIA B200", mib=183_359, gb_per_second=8000, link="nvlink5"),
        _gpu("h100", "NVIDIA H100 80GB HBM3", mib=81_559, gb_per_second=3350, link="nvlink4"),
        _gpu("h100_pcie", "NVIDIA H100 PCIe", mib=81_559, gb_per_second=2039, link="pcie5"),
        _gpu("h200", "NVIDIA H200", mib=143_771, gb_per_second=4800, link="nvlink4"),
        _gpu("l4", "NVIDIA L4", mib=23_034, gb_per_second=300, link="pcie4"),
        _gpu("l40s", "NVIDIA L40S", mib=46_068, gb_per_second=864, link="pcie4"),
        _gpu("rtx3090", "NVIDIA GeForce RTX 3090", mib=24_576, gb_per_second=936, link="pcie4"),
        _gpu("rtx4090", "NVIDIA GeForce RTX 4090", mib=24_564, gb_per_second=1008, link="pcie4"),
    )
}
# bytes per second and direction, of one device
LINKS = {
    "nvlink3": 300e9,
    "nvlink4": 450e9,
    "nvlink5": 900e9,
    "pcie4": 32e9,
    "pcie5": 64e9,
    "ib200": 25e9,
    "ib400": 50e9,
    "ethernet100": 12.5e9,
}
_NETWORKS = ("ib200", "ib400", "ethernet100")  # between nodes, per device
# seconds of one step of a ring within a node and between nodes, of NCCL's model of itself (tuning.cc, protocol Simple)
_HOP_SECONDS, _PCIE_HOP_SECONDS, _NETWORK_HOP_SECONDS = 3.4e-6, 5.7e-6, 14e-6
# achievable fraction of link and memory bandwidth: nccl-tests on NVLink and stream benchmarks on HBM reach 75 to 90 %
LINK_EFFICIENCY = 0.75
LARGEST_NODE = 8  # more devices than this in `plan.hardware=` are several nodes


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster with one kind of device.

    Attributes:
        device: Kind of device.
        per_node: Devices per node.
        num_nodes: Number of nodes.
        link: Link between the devices of a node.
        network: Link between nodes, per device.
        memory_bytes: Usable memory of one device.
    """

    device: Device
    per_node: int
    num_nodes: int
    link: str
    network: str
    memory_bytes: int

    @property
    def num_devices(self) -> int:
        """Number of devices in all nodes."""
        return self.per_node * self.num_nodes

    def bandwidth_between(self, num_ranks: int, *, stride: int = 1) -> float:
        """Return a rank's bandwidth per direction when all groups of this kind communicate at once.

        Each rank of a group in a node uses its own network link (rails), as NCCL's rings do: groups of whole nodes are
        nearly as fast as within a node, groups with one rank per node are not.

        Args:
            num_ranks: Ranks in the group.
            stride: Distance between consecutive ranks; 1 for neighbors.
        """
        if (num_ranks - 1) * stride < self.per_node:
            return LINKS[self.link] * LINK_EFFICIENCY
        rails = min(max(self.per_node // stride, 1), num_ranks)
        return min(LINKS[self.link], rails * LINKS[self.network]) * LINK_EFFICIENCY

    def latency_between(self, num_ranks: int, *, stride: int = 1) -> float:
        """Return the latency of one trip around the ring of a group, in seconds."""
        nodes = self._nodes_of(num_ranks, stride)
        return max(num_ranks - nodes, 0) * self._hop + (nodes - 1) * _NETWORK_HOP_SECONDS

    def reduction_latency(self, num_ranks: int, *, stride: int = 1) -> float:
        """Return the latency of an all-reduce in seconds: twice around a ring, or up and down a tree."""
        nodes = self._nodes_of(num_ranks, stride)
        tree = (-(-num_ranks // nodes) - 1) * self._hop + math.log2(nodes) * _NETWORK_HOP_SECONDS
        return 2 * min(self.latency_between(num_ranks, stride=stride), tree)

    def _nodes_of(self, num_ranks: int, stride: int) -> int:
        return min(num_ranks, -(-num_ranks * stride // self.per_node)) if num_ranks > 1 else 1

    @property
    def _hop(self) -> float:
        return _PCIE_HOP_SECONDS if self.link.startswith("pcie") else _HOP_SECONDS


def find_cluster(
    hardware: str, *, per_node: int | None, num_nodes: int, interconnect: str | None, memory_gib: float | None
) -> Cluster:
    """Return the cluster named by `plan.hardware=`.

    Args:
        hardware: A device and the number of devices, `h100x8`, in nodes of 8, or in the requested nodes, if there are
            more; `auto` and `measured` are this machine.
        per_node: Requested ranks per node; None is all devices of a node.
        num_nodes: Requested nodes.
        interconnect: Link between devices of a node or, with several nodes, between nodes; None is the usual one.
        memory_gib: Memory of a device, including what the driver and the CUDA context take; None uses the table.

    Raises:
        ConfigError: There is no such device or link, the devices do not make whole nodes, or no memory is left.
    """
    is_here = hardware in (AUTO, MEASURED)
    device, count = _this_machine() if is_here else _parse(hardware)
    if not is_here and per_node is None and count > LARGEST_NODE:
        count, num_nodes = _split_into_nodes(device, count, num_nodes)
    if interconnect is not None and interconnect not in LINKS:
        raise ConfigError(
            f"plan.interconnect={interconnect}",
            "no such link is known",
            f"plan.interconnect=<{' | '.join(LINKS)}>",
        )
    is_between = interconnect in _NETWORKS
    if interconnect is not None and is_between == (num_nodes == 1):
        fits = [name for name in LINKS if (name in _NETWORKS) != is_between]
        raise ConfigError(
            f"plan.interconnect={interconnect}",
            "it is a link between nodes, and there is one"
            if is_between
            else "it is a link within a node, and there are several",
            f"plan.interconnect=<{' | '.join(fits)}>, or plan.interconnect=null for the usual one",
        )
    link, network = device.link, "ib400"
    if interconnect is not None:
        link, network = (link, interconnect) if num_nodes > 1 else (interconnect, network)
    total = device.memory_bytes if memory_gib is None else int(memory_gib * GIB)
    if total <= device.context_bytes:
        raise ConfigError(
            f"plan.memory_gib={memory_gib}",
            f"the CUDA context alone takes {device.context_bytes / GIB:g} GiB",
            f"plan.memory_gib=<above {device.context_bytes / GIB:g}>, or plan.memory_gib=null for all of its memory",
        )
    return Cluster(
        device=device,
        per_node=count if per_node is None else per_node,
        num_nodes=num_nodes,
        link=link,
        network=network,
        memory_bytes=total - device.context_bytes,
    )


def _split_into_nodes(device: Device, count: int, num_nodes: int) -> tuple[int, int]:
    """Return devices per node and nodes of more devices than a node holds.

    Args:
        device: Kind of device.
        count: Number of devices.
        num_nodes: Requested nodes; 1 asks for nodes of 8.
    """
    nodes = num_nodes if num_nodes > 1 else count // LARGEST_NODE
    per_node, rest = divmod(count, nodes)
    if not rest and per_node <= LARGEST_NODE:
        return per_node, nodes
    whole = -(-count // LARGEST_NODE) * LARGEST_NODE
    fixes = [f"plan.hardware={device.name}x{whole}" + (" trainer.num_nodes=1" if num_nodes > 1 else "")]
    fewest = -(-count // LARGEST_NODE)
    equal = next((nodes for nodes in range(fewest, count // 2 + 1) if count % nodes == 0), None)
    fixes += [f"trainer.num_nodes={equal} for nodes of {count // equal}"] if equal is not None else []
    reason = f"they are not {num_nodes} equal nodes" if num_nodes > 1 else "they are no whole number of nodes"
    raise ConfigError(f"plan.hardware={device.name}x{count}", f"{reason} of at most 8 devices", ", or ".join(fixes))


def _parse(hardware: str) -> tuple[Device, int]:
    name, _, count = hardware.rpartition("x")
    if hardware in DEVICES:  # rtx4090: its x is no count
        name, count = hardware, "1"
    if name not in DEVICES or re.fullmatch(r"[1-9][0-9]{0,4}", count) is None:
        if name in DEVICES:
            reason, fix = f"the number behind {name}x counts its devices, from 1 to 99999", f"plan.hardware={name}x8"
            raise ConfigError(f"plan.hardware={hardware}", reason, fix)
        swapped = re.fullmatch(r"([1-9]\d{0,4})[x*](\w+)", hardware.lower())
        if swapped and swapped[2] in DEVICES:
            fix = f"plan.hardware={swapped[2]}x{swapped[1]}"
            raise ConfigError(f"plan.hardware={hardware}", "the number of devices stands behind their name", fix)
        raise ConfigError(
            f"plan.hardware={hardware}",
            "no such device is known",
            f"plan.hardware=auto, =measured, or <{' | '.join(DEVICES)}>, with x8 for eight in a node",
        )
    return DEVICES[name], int(count)


def _this_machine() -> tuple[Device, int]:
    if not torch.cuda.is_available():
        return Device(name="cpu", full_name=None, memory_bytes=_host_memory(), bandwidth=None, link="pcie4"), 1
    full_name, memory = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory
    known = next((device for device in DEVICES.values() if device.full_name == full_name), None)
    return (
        Device(
            name=full_name,
            full_name=full_name,
            memory_bytes=memory,
            bandwidth=known.bandwidth if known else None,
            link=known.link if known else "pcie4",
        ),
        torch.cuda.device_count(),
    )


def _host_memory() -> int:
    """Return the memory that this process may use: the machine's, or less in a container and under `ulimit -v`."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limits.append(address_space)
    groups = _CGROUPS.read_text(encoding="utf-8").splitlines() if _CGROUPS.is_file() else []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        root, name = ("", "memory.max") if not controllers else ("memory", "memory.limit_in_bytes")
        if controllers and "memory" not in controllers.split(","):
            continue
        own = Path("/sys/fs/cgroup", root, path.lstrip("/"))
        for file in (folder / name for folder in (own, *own.parents)):  # a group above may have a lower limit
            if file.is_file() and (text := file.read_text(encoding="utf-8").strip()).isdigit():  # else "max"
                limits.append(int(text))
    return min(limits)
