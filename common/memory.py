"""Peak memory of this process."""

import re
import resource
from pathlib import Path

KIB_PER_MIB = 1024


def peak_resident_mib() -> float:
    """Peak resident memory since exec(); getrusage() also counts the process before it."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        found = None
    kib = int(found.group(1)) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib / KIB_PER_MIB
