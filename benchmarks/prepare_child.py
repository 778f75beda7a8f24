"""Runs `data.prepare` and prints the peak memory of this process and its workers as JSON; see benchmarks/prepare.py."""

import json
import resource
import sys

from data import prepare

if __name__ == "__main__":
    prepare.main(sys.argv[1:])
    peaks = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(json.dumps({"rss_mb": max(peaks) / 1024}))
