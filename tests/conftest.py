"""Fixtures that several folders of tests share."""

from collections.abc import Generator

import pytest

from tests.rank_server import RankServer


def pytest_configure() -> None:
    """Tests in half precision must not die where a CPU announces AMX without having it.

    oneDNN reads the limit at its first product, so this comes before any test.
    """
    from training.precision import avoid_broken_amx

    avoid_broken_amx()


@pytest.fixture(scope="session")
def rank_server() -> Generator[RankServer]:
    with RankServer() as server:
        yield server
