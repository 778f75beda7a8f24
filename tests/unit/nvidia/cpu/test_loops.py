"""Compiled loops are kept on disk where that is possible, and do not start threads of their own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import PROJECT

CHILD = """
import runpy, sys
loops = runpy.run_path(sys.argv[1])
print([sum(loops[name].stats.cache_hits.values()) for name in ("attend", "attend_backward", "drop")])
found = loops["ThreadpoolController"]().select(internal_api="openblas").lib_controllers
print({library.num_threads for library in found} <= {1})
"""


@pytest.mark.parametrize("is_writable", [True, False])
def test_loops_are_compiled_once_where_they_can_be_kept(is_writable: bool, tmp_path: Path) -> None:
    source = tmp_path / "loops.py"
    shutil.copy(PROJECT / "nvidia" / "cpu" / "loops.py", source)
    environment = {name: value for name, value in os.environ.items() if not name.endswith("NUM_THREADS")}
    if not is_writable:  # files are in the place of the folders
        (tmp_path / "__pycache__").touch()
        environment |= {"HOME": str(source), "XDG_CACHE_HOME": str(source)}

    def load() -> str:
        command = [sys.executable, "-c", CHILD, str(source)]
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert (child.returncode, child.stderr) == (0, "")
        return child.stdout

    assert load() == "[0, 0, 0]\nTrue\n"
    assert load() == f"[{'1, 1, 1' if is_writable else '0, 0, 0'}]\nTrue\n"
