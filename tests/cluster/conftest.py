"""Fixtures of the cluster tests. They need root and some Debian packages: scripts/test.sh --cluster installs those."""

from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from tests.cluster.machines import Machine, find_missing, two_machines


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture
def machines(tmp_path: Path) -> Generator[tuple[Machine, Machine]]:
    """worker-0 and worker-1, connected to each other only; `tmp_path` is on the disk they share."""
    missing = find_missing()
    if missing is not None:
        pytest.skip(missing)
    (tmp_path / "shared").mkdir()
    with two_machines(tmp_path / "shared") as pair:
        yield pair
