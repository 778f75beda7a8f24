"""Fixtures that several folders of tests share."""

from collections.abc import Generator

import pytest

from tests.rank_server import RankServer


@pytest.fixture(scope="session")
def rank_server() -> Generator[RankServer]:
    with RankServer() as server:
        yield server
