"""Documents are cut into instances, and rows are assembled from them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.instances.segments import (
    Documents,
    Instances,
    Objective,
    SpecialIds,
    assemble_rows,
    join_texts,
    make_instances,
)

SPECIAL = SpecialIds(pad=0, cls=2, sep=3)
documents_ = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=1, max_size=8)


def make_documents(shape: list[list[int]], first: int = 10) -> Documents:
    """Documents of sentences of the given lengths; token t is first + t, so a token gives its position."""
    total = sum(map(sum, shape))
    sentences = [length for document in shape for length in document]
    return Documents(
        tokens=np.arange(first, first + total, dtype=np.uint32),
        word_starts=np.ones(total, dtype=bool),
        sentence_ends=np.cumsum(sentences),
        document_ends=np.cumsum([len(document) for document in shape]),
        document_keys=first + np.arange(len(shape), dtype=np.uint64),
    )


def made(documents: Documents, donor: Documents, objective: Objective, length: int = 32, seed: int = 0) -> Instances:
    return make_instances(documents, donor, objective, length, 0.1, np.random.default_rng(seed))


def document_of(documents: Documents, token: np.ndarray) -> np.ndarray:
    ends = documents.sentence_ends[documents.document_ends - 1]
    return np.searchsorted(ends, token, side="right")


@settings(max_examples=120)
@given(documents_, documents_, st.sampled_from(["nsp", "sop", "mlm"]), st.booleans(), st.integers(0, 99))
def test_instances_fit_and_stay_within_their_documents(
    shape: list[list[int]], donated: list[list[int]], objective: Objective, alone: bool, seed: int
) -> None:
    documents = make_documents(shape)
    donor = documents if alone else make_documents(donated, first=1_000_000)
    found = made(documents, donor, objective, seed=seed)
    room = 32 - (2 if objective == "mlm" else 3)
    assert (found.a_length >= 1).all(), "A is never empty"
    assert (found.a_length + found.b_length <= room).all()
    assert (document_of(documents, found.a_start) == document_of(documents, found.a_start + found.a_length - 1)).all()
    if objective == "mlm":
        assert (found.b_length == 0).all()
        assert found.a_length.sum() == len(documents.tokens), "nothing is lost, nothing comes twice"
        return
    assert (found.b_length >= 1).all()
    for own, source in ((found.b_is_donated == 0, documents), (found.b_is_donated == 1, donor)):
        start, end = found.b_start[own], found.b_start[own] + found.b_length[own] - 1
        assert (end < len(source.tokens)).all()
        assert (document_of(source, start) == document_of(source, end)).all()
    kept = found.b_is_donated == 0
    same = document_of(documents, found.a_start) == document_of(documents, found.b_start)
    assert same[kept].all()
    if objective == "nsp":
        assert np.array_equal(found.label, found.b_is_donated)
        assert (found.b_start >= found.a_start + found.a_length)[kept].all(), "B follows A"
        if alone:
            assert not same[~kept].any(), "a random B is from another document"
    else:
        swapped = found.label == 1
        assert (found.b_start > found.a_start)[~swapped].all()
        assert (found.b_start < found.a_start)[swapped].all()


def test_shares_of_random_pairs_of_short_rows_and_of_swaps() -> None:
    rng = np.random.default_rng(0)
    documents = make_documents([rng.integers(5, 20, 60).tolist() for _ in range(200)])
    found = made(documents, documents, "nsp", 128)
    assert 0.47 < found.label.mean() < 0.53
    lengths = found.a_length + found.b_length
    assert 0.78 < (lengths == 125).mean() < 0.95
    assert (lengths < 62).mean() > 0.03
    ordered = made(documents, documents, "sop", 128)
    assert 0.45 < ordered.label.mean() < 0.55


def test_truncation_is_fair() -> None:
    """Both segments keep about half, and both are cut at either end."""
    rng = np.random.default_rng(0)
    documents = make_documents([[400, 400] for _ in range(300)])
    found = make_instances(documents, documents, "nsp", 64, 0.0, rng)
    assert set(found.a_length.tolist()) <= {30, 31}
    assert set(found.b_length.tolist()) <= {30, 31}
    offset = found.a_start % 400
    assert 150 < offset.mean() < 220


def test_a_part_of_the_same_document_is_never_a_random_segment() -> None:
    """Four parts of one document and one other document: a random B is always from the other."""
    keys = np.array([7, 7, 9, 7, 7], dtype=np.uint64)
    documents = make_documents([[9] * 30 for _ in range(5)])._replace(document_keys=keys)
    donor = make_documents([[9] * 30 for _ in range(5)])._replace(document_keys=keys)
    for source in (documents, donor):
        found = made(documents, source, "nsp")
        drawn = found.b_is_donated == 1
        assert drawn.sum() > 20
        own = keys[document_of(documents, found.a_start)]
        assert (own[drawn] != keys[document_of(source, found.b_start)][drawn]).all()
    alone = made(documents, donor._replace(document_keys=np.full(5, 7, dtype=np.uint64)), "nsp")
    of_seven = keys[document_of(documents, alone.a_start)] == 7
    assert not alone.b_is_donated[of_seven].any(), "no other document, no random segment"
    assert alone.b_is_donated[~of_seven].any()


def test_no_documents_no_instances() -> None:
    empty = Documents(*(np.empty(0, dtype=np.int64) for _ in range(5)))
    assert made(empty, empty, "nsp").num_rows == 0


@pytest.mark.parametrize("objective", ["nsp", "mlm", "sop"])
def test_rows_hold_exactly_the_instances(objective: Objective) -> None:
    rng = np.random.default_rng(1)
    documents = make_documents([rng.integers(1, 30, 9).tolist() for _ in range(20)])
    donor = make_documents([rng.integers(1, 30, 9).tolist() for _ in range(20)], first=50_000)
    found = made(documents, donor, objective, 37)
    b_first = np.where(found.b_is_donated == 1, len(documents.tokens), 0)
    placed = found._replace(b_start=found.b_start + b_first)
    rows = assemble_rows(join_texts([documents, donor]), placed, SPECIAL, 37, 6)
    for k in range(found.num_rows):
        a = documents.tokens[found.a_start[k] : found.a_start[k] + found.a_length[k]].tolist()
        source = donor if found.b_is_donated[k] else documents
        b = source.tokens[found.b_start[k] : found.b_start[k] + found.b_length[k]].tolist()
        expected = [2, *a, 3, *b, 3] if b else [2, *a, 3]
        segments = [0] * (len(a) + 2) + [1] * (len(b) + 1) if b else [0] * len(expected)
        padding = [0] * (37 - len(expected))
        assert rows.input_ids[k].tolist() == expected + padding
        assert rows.segment_ids[k].tolist() == segments + padding
        assert rows.input_mask[k].tolist() == [1] * len(expected) + padding
    assert not rows.masked_lm_positions.any()
    assert np.array_equal(rows.next_sentence_labels, found.label)
