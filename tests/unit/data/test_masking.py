"""Masking: shares, what is never masked, whole words, spans."""

from itertools import pairwise

import numpy as np
import pytest

from common.errors import UserError
from data.masking import MaskingPolicy, Unit, mask_rows
from data.shards.schema import Rows
from tests.unit.data.shards_on_disk import MASK, SPECIAL_IDS, VOCAB_SIZE, make_rows


def policy(unit: Unit = "token", **options: object) -> MaskingPolicy:
    settings = {"max_predictions_per_seq": 20, **options}
    return MaskingPolicy(mask_id=MASK, special_ids=SPECIAL_IDS, vocab_size=VOCAB_SIZE, unit=unit, **settings)  # type: ignore[arg-type]


def originals(count: int = 3000, width: int = 120) -> Rows:
    rows = make_rows(count, width=width, predictions=20).with_originals()
    starts = np.random.default_rng(1).random((count, width)) < 0.6
    return rows.replace(word_starts=np.packbits(starts, axis=1))


def masked(rows: Rows, chosen: MaskingPolicy, **options: object) -> Rows:
    settings = {"seed": 3, "epoch": 1, "row_numbers": np.arange(len(rows)), **options}
    return mask_rows(rows, chosen, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("unit", ["token", "word", "span"])
def test_only_text_is_masked_and_can_be_restored(unit: Unit) -> None:
    rows = originals()
    result = masked(rows, policy(unit))
    assert np.array_equal(result.with_originals().input_ids, rows.input_ids)
    positions = result.masked_lm_positions
    row_index, column = np.nonzero(positions)
    predicted = rows.input_ids[row_index, positions[row_index, column]]
    assert not np.isin(predicted, SPECIAL_IDS).any()
    assert rows.input_mask[row_index, positions[row_index, column]].all()
    assert (np.diff(np.where(positions == 0, 10_000, positions), axis=1)[positions[:, 1:] > 0] > 0).all(), "ascending"
    untouched = np.ones_like(rows.input_ids, dtype=bool)
    untouched[row_index, positions[row_index, column]] = False
    assert np.array_equal(result.input_ids[untouched], rows.input_ids[untouched])


def test_shares_are_80_10_10_and_random_tokens_come_from_the_whole_vocabulary() -> None:
    rows = originals()
    result = masked(rows, policy())
    row_index, column = np.nonzero(result.masked_lm_positions)
    where = result.masked_lm_positions[row_index, column]
    new, old = result.input_ids[row_index, where], rows.input_ids[row_index, where]
    assert abs((new == MASK).mean() - 0.8) < 0.01
    assert abs((new == old).mean() - 0.1) < 0.01
    random = new[(new != MASK) & (new != old)]
    assert not np.isin(random, SPECIAL_IDS).any()
    assert random.min() < 50
    assert random.max() > VOCAB_SIZE - 50


@pytest.mark.parametrize("rate", [0.15, 0.4])
def test_the_number_of_predictions_follows_the_rate(rate: float) -> None:
    rows = originals()
    counts = (masked(rows, policy(rate=rate, max_predictions_per_seq=60)).masked_lm_positions > 0).sum(axis=1)
    lengths = rows.input_mask.sum(axis=1)
    assert np.array_equal(counts, np.maximum(1, np.rint(lengths * rate)).astype(int).clip(max=lengths - 3))


def test_every_text_position_is_chosen_equally_often() -> None:
    rows = originals(4000, 16)
    full = rows.take(np.flatnonzero(rows.input_mask.sum(axis=1) == 16))
    chosen = np.concatenate([masked(full, policy(), epoch=e).masked_lm_positions.ravel() for e in range(30)])
    able = np.isin(full.input_ids, SPECIAL_IDS, invert=True).sum(axis=0)
    share = np.bincount(chosen[chosen > 0], minlength=16)[1:15] / able[1:15]
    assert share.std() / share.mean() < 0.1


def test_masks_of_a_row_do_not_depend_on_the_batch() -> None:
    rows = originals(200)
    together = masked(rows, policy("word"))
    for chosen in ([7], [150, 3, 99]):
        alone = masked(rows.take(np.array(chosen)), policy("word"), row_numbers=np.array(chosen))
        assert np.array_equal(alone.input_ids, together.input_ids[chosen])


def test_words_are_masked_whole_by_word_starts() -> None:
    rows = originals()
    result = masked(rows, policy("word"))
    starts = np.unpackbits(rows.word_starts, axis=1, count=120).astype(bool)  # type: ignore[arg-type]
    able = ~np.isin(rows.input_ids, SPECIAL_IDS)
    for k in range(300):
        chosen = set(result.masked_lm_positions[k][result.masked_lm_positions[k] > 0].tolist())
        words = words_of(starts[k], able[k])
        assert all(set(word) <= chosen or not set(word) & chosen for word in words)
    counts = (result.masked_lm_positions > 0).sum(axis=1)
    budgets = np.clip(np.rint(rows.input_mask.sum(axis=1) * 0.15), 1, 20)
    assert (counts <= budgets).all()
    assert (counts == budgets).mean() > 0.9, "small words fill what large ones leave"


def words_of(starts: np.ndarray, able: np.ndarray) -> list[list[int]]:
    words: list[list[int]] = []
    for column in range(len(able)):
        if able[column]:
            if starts[column] or not able[column - 1]:
                words.append([])
            words[-1].append(column)
    return words


def test_spans_are_longer_than_words_and_end_at_ten_words() -> None:
    rows = originals()
    every = np.packbits(np.ones((len(rows), 120), dtype=bool), axis=1)
    rows = rows.replace(word_starts=every)
    lengths = []
    for row in masked(rows, policy("span")).masked_lm_positions:
        chosen = row[row > 0]
        breaks = [0, *(np.flatnonzero(np.diff(chosen) > 1) + 1), len(chosen)]
        lengths += [b - a for a, b in pairwise(breaks)]
    assert 2.5 < np.mean(lengths) < 6
    single = masked(rows, policy("token")).masked_lm_positions
    assert np.mean(np.diff(single, axis=1)[single[:, 1:] > 0] == 1) < 0.25


def test_words_by_the_tokenizer_s_continuations_if_the_shard_has_no_word_starts() -> None:
    rows = originals(50).replace(word_starts=None)
    with pytest.raises(UserError, match="word starts"):
        masked(rows, policy("word"))
    masked(rows, policy("word", continuation_ids=tuple(range(2000, 3000))))


def test_the_rate_can_follow_the_step() -> None:
    rows = originals(500)
    scheduled = policy(rate_schedule=((0, 0.3), (100, 0.1)), max_predictions_per_seq=60)
    counts = [(masked(rows, scheduled, step=step).masked_lm_positions > 0).sum() for step in (0, 50, 100, 1000)]
    assert counts[0] > counts[1] > counts[2] == counts[3]


@pytest.mark.parametrize(
    "options", [{"rate": 0.0}, {"rate": 1.5}, {"unit": "letter"}, {"rate_schedule": ((5, 0.1), (5, 0.2))}]
)
def test_a_policy_that_cannot_work_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(UserError):
        policy(**options)  # type: ignore[arg-type]


def test_position_0_is_never_predicted_whatever_its_token() -> None:
    rows = originals(300)
    rows.input_ids[:, 0] = 77
    result = masked(rows, policy())
    assert np.array_equal(result.input_ids[:, 0], rows.input_ids[:, 0])
    budgets = np.clip(np.rint(rows.input_mask.sum(axis=1) * 0.15), 1, 20)
    assert np.array_equal((result.masked_lm_positions > 0).sum(axis=1), budgets), "nor does it use up a prediction"
