"""Settings of a process for the libraries that compute matrix products. Imports neither torch nor numpy."""

import os
import sys
from collections.abc import MutableMapping


def prepare_libraries(environment: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Set what OpenBLAS reads when numpy is imported, and return it. Call this before that.

    Variables that the user has set are kept. Nothing is set if the library has read them already.
    """
    if "numpy" in sys.modules:
        return {}
    # OpenBLAS starts its threads with openblas.set_num_threads, in the mode for denormal numbers that the run has set.
    # An idle one looks for work for 2^18 cycles only, and then leaves its core to the threads of torch.
    wanted = {"OPENBLAS_NUM_THREADS": "1", "OPENBLAS_THREAD_TIMEOUT": "18"}
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
