"""Read the host memory still available to this process from /proc/meminfo and the cgroup files."""

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 2**60  # cgroup v1 writes a number near 2**63 for "no limit"


def available_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """Return how many bytes can still be allocated on this machine and within the container's limit.

    Returns:
        The smaller of the two; None if neither is known.
    """
    limits = [_of_machine(meminfo), _of_container(cgroup)]
    return min((limit for limit in limits if limit is not None), default=None)


def _of_machine(meminfo: Path) -> int | None:
    if not meminfo.is_file():
        return None
    for line in meminfo.read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _of_container(cgroup: Path) -> int | None:
    """Read cgroup v2, then v1. The inactive page cache is reclaimable and counts as free."""
    for limit_file, used_file, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        if not (cgroup / limit_file).is_file() or not (cgroup / used_file).is_file():
            continue
        limit = (cgroup / limit_file).read_text(encoding="utf-8").strip()
        if limit == "max" or int(limit) >= _UNLIMITED:
            return None
        used = int((cgroup / used_file).read_text(encoding="utf-8"))
        stat_file = (cgroup / used_file).with_name("memory.stat")
        fields = stat_file.read_text(encoding="utf-8").split() if stat_file.is_file() else []  # name, value, …
        reclaimable = int(fields[fields.index(cache) + 1]) if cache in fields else 0
        return int(limit) - used + reclaimable
    return None
