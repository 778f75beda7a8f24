"""What a benchmark's clock counts: wall time, or this process's processor time on a machine that others use too.

BENCHMARK_CLOCK=cpu counts processor time. It is meant for OMP_NUM_THREADS=1: threads that wait for each other would
count as work.
"""

import os
import time


def clock() -> float:
    """Seconds, of which only differences mean anything."""
    return time.process_time() if os.environ.get("BENCHMARK_CLOCK") == "cpu" else time.perf_counter()
