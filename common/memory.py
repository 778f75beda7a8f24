"""How much main memory this process has held at most."""

import re
import resource
from pathlib import Path

KIB_PER_MIB = 1024


def peak_resident_mib() -> float:
    """Of this program alone: getrusage() also counts what the process held before it became this program."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        found = None
    kib = int(found.group(1)) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib / KIB_PER_MIB
