"""Fixtures of the distributed tests."""

import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Generator[Path]:
    """A real file system of two megabytes, because its errors are tested; skipped where mounting is not allowed."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
