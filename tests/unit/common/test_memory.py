"""Memory of this process; memory that is still available: the strictest of the limits of machine and control groups."""

import mmap
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from common.memory import MALLOC_VARIABLES, available_bytes, keep_freed_memory, resident_bytes


def write_group(folder: Path, limit: str, usage: int, cache: int, names: tuple[str, str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\nactive_file 6\n{names[2]} {cache}\n")


NEW = ("memory.max", "memory.current", "inactive_file")
OLD = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def test_the_strictest_of_nested_limits_counts(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("4:memory:/job/task\n0::/slurm/job\n")
    assert available_bytes(tmp_path, own) == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    write_group(tmp_path / "slurm", "max", 500, 0, NEW)
    write_group(tmp_path / "slurm" / "job", "1000000", 300_000, 20_000, NEW)
    assert available_bytes(tmp_path, own) == 720_000
    write_group(tmp_path / "memory" / "job", "9223372036854771712", 1, 0, OLD)
    write_group(tmp_path / "memory" / "job" / "task", "600000", 100_000, 10_000, OLD)
    assert available_bytes(tmp_path, own) == 510_000
    write_group(tmp_path / "memory" / "job" / "task", "600000", 700_000, 10_000, OLD)
    assert available_bytes(tmp_path, own) == 0


def test_resident_memory_grows_with_what_is_used() -> None:
    before = resident_bytes()
    with mmap.mmap(-1, 50_000_000) as used:  # from the system: an allocator may have as much left from other tests
        for _ in range(50):
            used.write(b"x" * 1_000_000)
        assert resident_bytes() - before > 0.8 * len(used)


def test_freed_memory_is_kept_unless_the_user_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *pair: calls.append(pair) or 1)
    monkeypatch.setattr("ctypes.CDLL", lambda _: library)
    for name in MALLOC_VARIABLES:  # Dask sets one of them in the process that starts workers
        monkeypatch.delenv(name, raising=False)
    assert keep_freed_memory()
    assert calls == [(-4, 0), (-1, 2**31 - 1)]
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_freed_memory()
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_")
    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace())
    assert not keep_freed_memory()
