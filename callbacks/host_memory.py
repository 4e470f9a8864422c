"""How much memory of the host is left to this process: two small files of the kernel."""

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 2**60


def available_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """What can still be allocated, by the machine and by the container's limit; None where neither is known."""
    known = [one for one in (_of_machine(meminfo), _of_container(cgroup)) if one is not None]
    return min(known) if known else None


def _of_machine(meminfo: Path) -> int | None:
    if not meminfo.is_file():
        return None
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _of_container(cgroup: Path) -> int | None:
    """Version 2, then version 1. Pages of files can be given back at any time and count as free."""
    for limit_file, used_file, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        if not (cgroup / limit_file).is_file() or not (cgroup / used_file).is_file():
            continue
        limit = (cgroup / limit_file).read_text().strip()
        if limit == "max" or int(limit) >= _UNLIMITED:
            return None
        used = int((cgroup / used_file).read_text())
        statistics = (cgroup / used_file).with_name("memory.stat")
        words = statistics.read_text().split() if statistics.is_file() else []
        reclaimable = int(words[words.index(cache) + 1]) if cache in words else 0
        return int(limit) - used + reclaimable
    return None
