"""Fixtures that several folders of tests share."""

import os
import signal
from collections.abc import Generator

import hypothesis
import pytest

from tests.rank_server import RankServer


def pytest_configure() -> None:
    """Before any test.

    Tests in half precision must not die where a CPU announces AMX without having it; oneDNN reads the limit at its
    first product. A machine that is slow for a moment does not make a property false, nor does it choose the library of
    a product, on which the last bits of a result depend. Properties are tried on the same examples in every run.
    """
    os.environ["CPU_PRODUCTS"] = "torch"
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("any_machine", deadline=None, derandomize=True, suppress_health_check=slow)
    hypothesis.settings.load_profile("any_machine")
    from nvidia.cpu.amx import avoid_broken_amx

    avoid_broken_amx()


@pytest.fixture(scope="session")
def rank_server() -> Generator[RankServer]:
    with RankServer() as server:
        yield server


@pytest.fixture
def heard_interrupts() -> Generator[None]:
    """Children of a background job, as a test run may be, have SIGINT ignored otherwise."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
