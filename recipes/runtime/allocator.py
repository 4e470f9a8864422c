"""Host memory of CPU training: freed tensors are reused in the next step, not returned to the kernel."""

import ctypes
import os
import sys

from recipes.runtime.console import LOGGER

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of glibc's malloc.h
_USER_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Let glibc's allocator keep freed memory for the rest of this process; return whether it will.

    By default, glibc maps each tensor above 32 MiB separately and unmaps it when it is freed. The next step maps it
    again, and the kernel zeroes every page on first touch: more than a third of the time of a GPT-2 124M step in
    bfloat16 (docs/measurements/speed.md). The process keeps its peak memory until it ends, with fragmentation up to a
    tenth more than the peak in use.

    Settings of the user in the environment take precedence. Other allocators and other systems are not changed.
    """
    if sys.platform != "linux":
        return False
    own = [name for name in _USER_VARIABLES if name in os.environ]
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        own.append("GLIBC_TUNABLES")
    if own:
        LOGGER.info("Freed host memory is handled as %s says; by default, a run on a CPU keeps it", " and ".join(own))
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return set_option is not None and bool(set_option(_MMAP_MAX, 0)) and bool(set_option(_TRIM_THRESHOLD, -1))
