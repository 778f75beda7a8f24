"""Which documents are dropped: exact duplicates and similar documents."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.preparation import duplicates
from data.preparation.duplicates import (
    DROPPED,
    DocumentHash,
    SignatureIndex,
    band_shape,
    drop_repeated,
    sign,
)

WORDS = [f"{a}{b}" for a in ("ba", "de", "fi", "go", "ku", "la") for b in ("m", "n", "r", "s", "t", "x", "z")]
SIGNATURE = [589219257, 1628939621, 1155595077, 1848234559]
SHAPES = [(14, 4), (8, 8), (5, 11), (3, 21)]


def texts(count: int, seed: int) -> list[list[str]]:
    rng = np.random.default_rng(seed)
    return [rng.choice(WORDS, 120).tolist() for _ in range(count)]


def test_the_index_finds_what_comparing_all_pairs_finds() -> None:
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


def test_signatures_and_bands_are_those_of_datasketch() -> None:
    """Computed once with datasketch 2.0.0: MinHash(num_perm=64, seed=1, scheme="affine32") and MinHashLSH."""
    assert sign("one two three four five six")[:4].tolist() == SIGNATURE
    assert [band_shape(threshold) for threshold in (0.5, 0.7, 0.8, 0.9)] == SHAPES


def test_a_document_similar_to_a_kept_one_is_dropped() -> None:
    documents = [" ".join(words) for words in texts(3, 0)]
    signatures = [sign(text) for text in (*documents, documents[1] + " end")]
    hashes = np.array([1, 2, DROPPED, 3], dtype=np.uint64)
    assert SignatureIndex(0.8).drop_similar(hashes, signatures) == 1
    assert hashes.tolist() == [1, 2, DROPPED, DROPPED]


@pytest.mark.parametrize("at_once", [2, 4_000_000])
def test_only_the_first_of_equal_documents_is_kept(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(duplicates, "_HASHES_AT_ONCE", at_once)
    hashes = [np.array(found, dtype=np.uint64) for found in ([1, 2, 1], [], [3, 2, 4], [4])]
    assert drop_repeated(hashes) == 3
    assert [found.tolist() for found in hashes] == [[1, 2, 0], [], [3, 0, 4], [0]]


@given(st.text(alphabet="ab é漢\n", max_size=40), st.lists(st.integers(0, 40), max_size=4))
def test_a_document_has_one_hash_however_it_is_cut(text: str, cuts: list[int]) -> None:
    def hash_of(*parts: str) -> int:
        found = DocumentHash()
        for part in parts:
            found.update(part)
        return found.result()

    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    found = hash_of(*(text[start:stop] for start, stop in pairwise(bounds)))
    assert found == hash_of(text) == hash_of("".join(text.split()))
    assert found != hash_of(text, "a")


def test_different_documents_have_different_hashes() -> None:
    found = {f"{a}{b}" for a in range(300) for b in range(300)} | {"ab" * n for n in range(1, 500)}
    found |= {"The lot is called a1234567i", "The lot is called b1234567."}  # equal modulo 2**64 - 59
    hashes = set()
    for text in found:
        document = DocumentHash()
        document.update(text)
        hashes.add(document.result())
    assert len(hashes) == len(found)
