"""Memory of this process and of its machine."""

import ctypes
import os
import re
import resource
from pathlib import Path

KIB_PER_MIB = 1024
CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")
MALLOC_VARIABLES = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
# Parameters of glibc's mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_MAX_INT = 2**31 - 1


def peak_resident_mib() -> float:
    """Peak resident memory since exec(); getrusage() also counts the process before it."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        found = None
    kib = int(found.group(1)) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib / KIB_PER_MIB


def keep_freed_memory() -> bool:
    """Let glibc reuse the memory of freed arrays; whether it does. Not if the user has set one of its variables.

    By default it returns large blocks to the system and gets new ones for the next arrays, page by page and filled
    with zeros: a tenth of a training step, and a twentieth of a preparation.
    """
    if any(name in os.environ for name in MALLOC_VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library or system
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _MAX_INT))


def resident_bytes() -> int:
    """Resident memory of this process now."""
    import psutil  # here, because scripts/doctor.py runs without the requirements

    return int(psutil.Process().memory_info().rss)


def available_bytes(root: Path = CONTROL_GROUPS, own: Path = OWN_GROUP) -> int:
    """Memory that processes can still take without swapping, by the machine and by the limits of a container."""
    import psutil

    sizes: list[int | None] = [int(psutil.virtual_memory().available)]
    for group in find_control_groups(root, own):
        sizes.append(_left_in(group, "memory.max", "memory.current", "inactive_file"))
    for group in find_control_groups(root / "memory", own, "memory"):
        sizes.append(_left_in(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
    return max(0, min(size for size in sizes if size is not None))


def find_control_groups(root: Path = CONTROL_GROUPS, own: Path = OWN_GROUP, controller: str = "") -> list[Path]:
    """The nested control groups of this process, whose limits all hold: of cgroup v2, or of a v1 controller."""
    lines = own.read_text().splitlines() if own.is_file() else []
    fields = (line.split(":", 2) for line in lines)
    inner = next((path.strip("/") for _, names, path in fields if controller in names.split(",")), "")
    return [root.joinpath(*inner.split("/")[:depth]) for depth in range(len(inner.split("/")) + 1)]


def _left_in(group: Path, limit: str, usage: str, cache: str) -> int | None:
    """Bytes left in a control group, with the file cache that it can drop; None if it has no limit."""
    try:
        most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
        dropped = re.search(rf"^{cache} (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return None
    return int(most) - used + (int(dropped.group(1)) if dropped else 0) if most.isdecimal() else None
