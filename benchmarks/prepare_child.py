"""Runs `data.prepare` and prints its memory and CPU time as JSON; see benchmarks/prepare.py.

The peak memory is that of this process or the largest worker; the CPU time is that of this process alone.
"""

import json
import resource
import sys

from data import prepare

if __name__ == "__main__":
    prepare.main(sys.argv[1:])
    own, workers = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    peak = max(own.ru_maxrss, workers.ru_maxrss)
    print(json.dumps({"rss_mb": peak / 1024, "own_cpu_s": own.ru_utime + own.ru_stime}))
