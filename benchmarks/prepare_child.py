"""Runs `data.prepare` and prints as JSON what it took; see benchmarks/prepare.py.

The peak memory of this process or of a worker, and the processor time of this process alone, which no worker shares.
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
