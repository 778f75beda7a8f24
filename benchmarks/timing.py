"""The clock of the benchmarks: wall time or, on a shared machine, this process's processor time.

BENCHMARK_CLOCK=cpu counts processor time. It is meant for OMP_NUM_THREADS=1: threads that wait for each other would
count as work.
"""

import os
import time


def clock() -> float:
    """Seconds since an arbitrary start."""
    return time.process_time() if os.environ.get("BENCHMARK_CLOCK") == "cpu" else time.perf_counter()
