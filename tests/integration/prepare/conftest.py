"""Fixtures for the tests of the prepare command."""

from pathlib import Path

import pytest

from data.text import sources
from tests.integration.prepare.corpora import write_corpus


@pytest.fixture(name="corpus", scope="module")
def _corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "a.txt", 1500)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut a small corpus into many sources."""
    monkeypatch.setattr(sources, "RANGE_BYTES", 200_000)
