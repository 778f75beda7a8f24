"""Settings of a process for the libraries that compute matrix products. Imports neither torch nor numpy."""

import os
import sys
from collections.abc import MutableMapping

SPIN_COUNT = "GOMP_SPINCOUNT"
# How often an idle thread of GNU OpenMP looks for work before it sleeps: some µs. By default it looks for milliseconds,
# in which the threads of OpenBLAS wait for a core: a step of a small model takes ten times as long.
MAX_SPINS = 1000


def prepare_libraries(environment: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Set what OpenMP and OpenBLAS read when torch and numpy are imported, and return it. Call this before that.

    Variables that the user has set are kept. Nothing is set if the libraries have read them already.
    """
    if "torch" in sys.modules or "numpy" in sys.modules:
        return {}
    # OpenBLAS starts its threads with openblas.set_num_threads, in the mode for denormal numbers that the run has set.
    # They, too, look for work for a short time only, 2^18 cycles, and leave the cores to those of torch.
    wanted = {SPIN_COUNT: str(MAX_SPINS), "OPENBLAS_NUM_THREADS": "1", "OPENBLAS_THREAD_TIMEOUT": "18"}
    added = {name: value for name, value in wanted.items() if name not in environment}
    environment.update(added)
    return added


def configure_onednn() -> None:
    """Limit the kernels that oneDNN and torch's layer above it cache; a value that the user has set is kept.

    Both keep what they build for each shape, about 0.7 MB, and the number of tokens differs from one packed batch to
    the next: without limits the caches grow to a gigabyte. One pass has about ten shapes.

    Both read these environment variables once, at the first product. Call this at the start of a process, before that.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "64")
