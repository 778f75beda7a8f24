"""Settings of oneDNN and of the memory allocator for this process."""

import ctypes
import os

# Parameters of glibc's mallopt.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_MAX_INT = 2**31 - 1


def configure_onednn() -> None:
    """Limit the kernels that oneDNN and torch's layer above it cache; a value that the user has set is kept.

    Both keep what they build for each shape, about 0.7 MB, and the number of tokens differs from one packed batch to
    the next: without limits the caches grow to a gigabyte. One pass has about ten shapes.

    Both read these environment variables once, at the first product. Call this at the start of a process, before that.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "64")


def keep_freed_memory() -> bool:
    """Let glibc reuse the memory of freed tensors; whether it does. Not if the user has set one of its variables.

    By default it returns large blocks to the system and gets new ones for the next tensors, page by page and filled
    with zeros: a tenth of a training step.
    """
    names = ("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
    if any(name in os.environ for name in names):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library or system
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _MAX_INT))
