"""Which documents are dropped: equal ones and similar ones."""

import numpy as np
import pytest

from data.preparation import duplicates
from data.preparation.duplicates import SignatureIndex, mark_repeated, sign

WORDS = [f"{a}{b}" for a in ("ba", "de", "fi", "go", "ku", "la") for b in ("m", "n", "r", "s", "t", "x", "z")]


def texts(count: int, seed: int) -> list[list[str]]:
    rng = np.random.default_rng(seed)
    return [rng.choice(WORDS, 120).tolist() for _ in range(count)]


def test_the_index_finds_what_comparing_all_pairs_finds() -> None:
    pytest.importorskip("datasketch")
    documents = texts(60, 0)
    for changed in range(0, 120, 8):  # copies with a few to all words replaced
        copy = list(documents[changed % 60])
        copy[:changed] = texts(1, changed + 1)[0][:changed]
        documents.append(copy)
    signatures = [sign(" ".join(document)) for document in documents]
    index = SignatureIndex(0.7)
    kept: list[np.ndarray] = []
    expected, found = [], []
    for signature in signatures:
        expected.append(all((signature == other).mean() < 0.7 for other in kept))
        found.append(index.add_unless_similar(signature))
        if expected[-1]:
            kept.append(signature)
    assert found == expected
    assert not all(found[60:])
    assert any(found[60:])


def test_only_the_first_of_equal_documents_is_kept() -> None:
    hashes = [np.array([1, 2, 1], dtype=np.uint64), np.array([3, 2], dtype=np.uint64)]
    keep = [np.ones(3, dtype=bool), np.ones(2, dtype=bool)]
    assert mark_repeated(hashes, keep) == 2
    assert [mask.tolist() for mask in keep] == [[True, True, False], [True, False]]


@pytest.mark.parametrize("at_once", [3, 4_000_000])
def test_the_parts_of_a_document_go_with_it_and_are_counted_once(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(duplicates, "_HASHES_AT_ONCE", at_once)
    pieces = [[5, 0, 0], [0, 5], [0, 0, 0], [0, 7, 5], [0, 7]]  # of documents 5, 5, 7, 5 and 7
    hashes = [np.array(piece, dtype=np.uint64) for piece in pieces]
    keep = [np.ones(len(piece), dtype=bool) for piece in pieces]
    assert mark_repeated(hashes, keep) == 3
    expected = [[True] * 3, [True, False], [False] * 3, [False, True, False], [False, False]]
    assert [mask.tolist() for mask in keep] == expected
