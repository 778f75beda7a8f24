"""The default share leaves enough rows for validation; a split of few rows is reported with the share it needs."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data.preparation.plan import check_splits, splits_of, with_validation_share
from data.preparation.settings import Settings
from data.preparation.work_folder import WorkFolder


def held_out(tmp_path: Path, documents: int, document_bytes: int, **options: float) -> tuple[float, int]:
    """The chosen share, and the number of documents that it holds out."""
    folder = WorkFolder(tmp_path / f"{documents}-{document_bytes}")
    keys = np.random.default_rng(1).integers(1, 2**63, documents, dtype=np.uint64)
    folder.save_array("keys", "a", np.concatenate([keys, np.zeros(3, np.uint64)]))
    folder.text_path("a").write_bytes(b"x" * documents * document_bytes)
    settings = with_validation_share(
        Settings((32, 128), (5, 20), validation_share=None, **options),  # type: ignore[arg-type]
        folder,
        ["a"],
    )
    assert settings.validation_share is not None
    return settings.validation_share, int((splits_of(keys, settings) == 1).sum())


def test_the_default_share_leaves_enough_rows_where_the_corpus_allows_it(tmp_path: Path) -> None:
    assert held_out(tmp_path, 100_000, 10)[0] == 0.01, "a large corpus keeps the usual share"
    share, documents = held_out(tmp_path, 5_000, 100)
    assert 0.04 < share < 0.06
    assert 250 <= documents <= 252
    share, documents = held_out(tmp_path, 100, 128 * 5 * 100)  # 100 rows each
    assert 4 <= documents <= 5
    share, documents = held_out(tmp_path, 500, 100)  # too small: a tenth of the documents
    assert documents in (50, 51)
    assert held_out(tmp_path, 500, 100, test_share=0.5)[1] in (25, 26)
    assert held_out(tmp_path, 4, 100)[0] == 0.01


def test_a_given_share_stays(tmp_path: Path) -> None:
    settings = Settings((32,), (5,), validation_share=0.02)
    assert with_validation_share(settings, WorkFolder(tmp_path), []) is settings


@pytest.mark.parametrize(
    ("found", "training", "expected"),
    [
        (50, 5 * 4950, "50 rows for validation (0.01 of the documents), fewer than 200, so its loss is uncertain; "
                       "--validation_share 0.05 would be enough"),
        (1, 5 * 99, "1 row for validation (0.01 of the documents), fewer than 200, so its loss is uncertain; give "
                    "more text"),
        (200, 5 * 19_800, None),
    ],
)  # fmt: skip
def test_a_split_of_few_rows_is_reported_with_the_share_that_would_be_enough(
    found: int, training: int, expected: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {("training", 32): training, ("validation", 32): found}
    check_splits(Settings((32,), (5,)), rows, Counter(documents=9, training_documents=8, validation_documents=1))
    printed = capsys.readouterr().err
    assert (f"--max_seq_length 32: {expected}" in printed) if expected else not printed
