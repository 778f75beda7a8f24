"""The settings of a process for oneDNN. Imports neither torch nor numpy."""

import os


def configure_onednn() -> None:
    """Limit the kernels that oneDNN and torch's layer above it cache; a value that the user has set is kept.

    Both keep what they build for each shape, about 0.7 MB, and the number of tokens differs from one packed batch to
    the next: without limits the caches grow to a gigabyte. One pass has about ten shapes.

    Both read these environment variables once, at the first product. Call this at the start of a process, before that.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "64")
