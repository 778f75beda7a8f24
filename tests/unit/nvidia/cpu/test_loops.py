"""Compiled loops are kept on disk where that is possible, and BLAS starts no threads of its own in them."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support import PROJECT

CHILD = """
from nvidia.cpu import attention_loops, loops
names = {attention_loops: ["attend", "attend_backward"], loops: ["drop", "gelu", "gelu_backward", "cross_entropy"]}
print(sum(sum(getattr(module, name).stats.cache_hits.values()) for module in names for name in names[module]))
found = attention_loops.ThreadpoolController().select(internal_api="openblas").lib_controllers
print({library.num_threads for library in found if "scipy.libs" in library.filepath} <= {1})
"""


NO_HOME = """
import os
os.environ.pop("HOME"), os.environ.pop("XDG_CACHE_HOME", None)
import pwd
pwd.getpwuid = lambda uid: {}[uid]  # as in a container whose user has no entry
"""


def load(cache: Path, home: Path, first: str = "") -> tuple[int, str]:
    """How many loops a new process finds compiled, and what it says; it executes `first` before."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("NUM_THREADS")}
    environment |= {"NUMBA_CACHE_DIR": str(cache), "HOME": str(home)}
    child = subprocess.run(
        [sys.executable, "-c", first + CHILD], cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stderr
    *said, hits, has_one_thread = child.stdout.splitlines()
    assert has_one_thread == "True"
    return int(hits), "".join([*said, child.stderr])


def test_loops_are_compiled_once_and_damaged_files_are_replaced(tmp_path: Path) -> None:
    cache, home = tmp_path / "cache", tmp_path / "home"
    assert [load(cache, home), load(cache, home)] == [(0, ""), (6, "")]
    kept = list(cache.rglob("*.nbc"))
    assert len(kept) == 6
    for path in kept:
        path.write_bytes(b"")
    assert [load(cache, home), load(cache, home)] == [(0, ""), (6, "")]  # in the other folder


def test_loops_work_where_nothing_can_be_written(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    hits, said = load(file, file, first=NO_HOME)
    assert hits == 0
    assert said.count("set NUMBA_CACHE_DIR to a folder that can") == 1
