"""Training streams and evaluation passes over real files."""

import threading
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data.masking import MaskingPolicy
from data.shards.dataset import PretrainingDataset
from data.stream.batches import Batch
from data.stream.loader import PREFETCHED_STEPS, StepBatches, TrainingStream, evaluation_batches
from data.stream.row_source import RowSource
from tests.unit.data.shards_on_disk import (
    MASK,
    SPECIAL_IDS,
    VOCAB_SIZE,
    make_rows,
    opened,
    write_nvidias,
    write_ours,
    write_shard,
)

POLICY = MaskingPolicy(mask_id=MASK, special_ids=SPECIAL_IDS, vocab_size=VOCAB_SIZE, max_predictions_per_seq=4)


def stream(dataset: PretrainingDataset, rank: int = 0, world_size: int = 1, **options: object) -> TrainingStream:
    chosen = {"seed": 5, "micro_batch_size": 3, "gradient_accumulation_steps": 2, **options}
    return TrainingStream(dataset, rank=rank, world_size=world_size, **chosen)  # type: ignore[arg-type]


def rows_of(dataset: PretrainingDataset, steps: int, first: int = 0, **options: object) -> list[tuple[int, ...]]:
    iterator = stream(dataset, **options).steps(first)  # type: ignore[arg-type]
    try:
        return [next(iterator).rows for _ in range(steps)]
    finally:
        iterator.close()  # type: ignore[attr-defined]


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    write_ours(tmp_path, [50, 7, 43])
    return tmp_path


@pytest.mark.parametrize(("unit", "is_read"), [("token", False), ("word", True), (None, False)])
def test_word_starts_are_read_only_for_masks_of_words(tmp_path: Path, unit: Any, is_read: bool) -> None:
    word_starts = np.full((50, 3), 255, np.uint8)
    write_shard(tmp_path / "training_0.hdf5", make_rows(50).replace(word_starts=word_starts), {})
    source = RowSource(opened(tmp_path), 1, None if unit is None else replace(POLICY, unit=unit))
    rows, _ = source.read(0, 10)
    source.close()
    assert (rows.word_starts is not None) == is_read


def test_fields_types_and_shapes_of_a_batch(folder: Path) -> None:
    iterator = stream(opened(folder)).steps(0)
    step = next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    batch = step.micro_batches[0]
    assert Batch._fields == (
        "kind", "input_ids", "input_mask", "segment_ids", "next_sentence_label", "masked_lm_labels"
    )  # fmt: skip
    assert (len(step.micro_batches), step.next_sample) == (2, 6)
    assert all(field.dtype == torch.int64 for field in batch)
    assert batch.kind.item() == 2
    assert batch.kind.ndim == 0
    assert [tuple(field.shape) for field in batch[1:]] == [(3, 24), (3, 24), (3, 24), (3,), (3, 24)]
    masked = batch.masked_lm_labels >= 0
    assert masked.sum() > 0
    assert (batch.input_ids[masked] == MASK).all()
    assert (batch.masked_lm_labels[~masked] == -1).all()


def test_content_and_labels_belong_to_the_row(folder: Path) -> None:
    dataset = opened(folder)
    originals = make_rows_of_folder([50, 7, 43])
    iterator = stream(dataset).steps(0)
    for _ in range(20):
        step = next(iterator)
        batches = step.micro_batches
        restored = torch.cat([torch.where(b.masked_lm_labels >= 0, b.masked_lm_labels, b.input_ids) for b in batches])
        assert np.array_equal(restored.numpy(), originals[[row % 100 for row in step.rows]])
    iterator.close()  # type: ignore[attr-defined]


def make_rows_of_folder(sizes: list[int]) -> np.ndarray:
    firsts = np.cumsum([0, *sizes])[:-1]
    return np.concatenate(
        [make_rows(size, int(first)).with_originals().input_ids for size, first in zip(sizes, firsts, strict=True)]
    )


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_global_batches_are_the_same_for_any_number_of_ranks(folder: Path, world_size: int) -> None:
    dataset = opened(folder)
    alone = rows_of(dataset, 5, micro_batch_size=24, gradient_accumulation_steps=1)
    share = 24 // world_size
    shares = [
        rows_of(dataset, 5, rank=rank, world_size=world_size, micro_batch_size=share, gradient_accumulation_steps=1)
        for rank in range(world_size)
    ]
    together = [sorted(row for share in shares for row in share[step]) for step in range(5)]
    assert together == [sorted(step) for step in alone]


@pytest.mark.parametrize("chunk_rows", [32, 256])
@pytest.mark.parametrize(("world_size", "batch"), [(1, 48), (4, 64), (8, 512), (8, 96), (8, 1024)])
def test_ranks_share_the_units_of_a_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, batch: int, chunk_rows: int
) -> None:
    """Together the ranks read each row about once per epoch, however many they are; older shards have larger units."""
    monkeypatch.setattr("data.shards.writer.CHUNK_ROWS", chunk_rows)
    monkeypatch.setattr("data.stream.order.WINDOW_ROWS", 2048)
    monkeypatch.setattr("data.stream.order.INTERLEAVED_WINDOW_ROWS", 2048)
    write_ours(tmp_path, [2048, 2000, 2048])
    dataset = opened(tmp_path)
    assert dataset.shards[0].layout.unit_rows == (32 if chunk_rows == 32 else 0)
    decoded, delivered = 0, []
    for rank in range(world_size):
        source = RowSource(dataset, 5, None, rank=rank, world_size=world_size)
        for start in range(0, dataset.num_rows // batch * batch, batch):
            delivered += source.read(start, start + batch)[1].tolist()
        decoded += source.decoded_rows
        source.close()
    assert len(delivered) == len(set(delivered)) == dataset.num_rows // batch * batch
    expected = len(delivered) + 2048  # small batches are read together, so the next epoch's first window is, too
    assert decoded < (1.3 if chunk_rows == 32 or world_size == 1 else 4) * expected


@settings(max_examples=15)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.sampled_from([1, 2, 3, 8]),
    st.integers(1, 3),
    st.integers(0, 2**40),
    st.integers(0, 60),
)
def test_any_shards_ranks_seeds_and_jumps(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], world_size: int, micro: int, seed: int, jump: int
) -> None:
    """From any step on, the shares of the ranks are the batches of one rank, with every row once per epoch."""
    folder = tmp_path_factory.mktemp("shards")
    write_ours(folder, sizes)
    dataset = opened(folder)
    batch, total = world_size * micro, sum(sizes)
    steps = -(-2 * total // batch)
    options = {"seed": seed, "gradient_accumulation_steps": 1}
    alone = rows_of(dataset, steps + jump % 5, micro_batch_size=batch, **options)
    flat = [row for step in alone for row in step]
    assert sorted(flat[:total]) == sorted(flat[total : 2 * total]) == list(range(total))
    first = jump % steps
    count = len(alone) - first
    shares = [
        rows_of(dataset, count, first * batch, rank=rank, world_size=world_size, micro_batch_size=micro, **options)
        for rank in range(world_size)
    ]
    together = [sorted(row for share in shares for row in share[step]) for step in range(count)]
    assert together == [sorted(step) for step in alone[first:]]


def test_every_row_once_per_epoch_and_batches_cross_its_end(folder: Path) -> None:
    steps = rows_of(opened(folder), 34)  # 34 * 6 = two epochs of 100 and 4 more
    flat = [row for step in steps for row in step]
    assert sorted(flat[:100]) == list(range(100))
    assert sorted(flat[100:200]) == list(range(100))
    assert flat[:100] != flat[100:200]


def test_a_stream_can_start_at_any_sample(folder: Path) -> None:
    dataset = opened(folder)
    assert rows_of(dataset, 5, first=29 * 6) == rows_of(dataset, 34)[29:]


def test_dynamic_masks_depend_on_seed_epoch_and_row_only(folder: Path) -> None:
    dataset = opened(folder)

    def labels(first: int, count: int, **options: object) -> dict[tuple[int, int], list[int]]:
        found = {}
        iterator = stream(dataset, masking=POLICY, **options).steps(first)  # type: ignore[arg-type]
        for _ in range(count):
            step = next(iterator)
            rows = torch.cat([batch.masked_lm_labels for batch in step.micro_batches]).tolist()
            for position, (row, label) in enumerate(zip(step.rows, rows, strict=True)):
                sample = step.next_sample - len(step.rows) + position
                found[sample // 100, row] = label
        iterator.close()  # type: ignore[attr-defined]
        return found

    reference = labels(0, 50)
    other = labels(60, 20, micro_batch_size=5, gradient_accumulation_steps=1)
    assert all(reference[key] == label for key, label in other.items())
    assert sum(reference[0, row] != reference[1, row] for row in range(100)) > 90
    assert labels(0, 1, seed=6) != labels(0, 1)


def test_nvidia_shards_give_the_same_rows(folder: Path, tmp_path: Path) -> None:
    nvidia = tmp_path / "nvidia"
    for number, (size, first) in enumerate([(50, 0), (7, 50), (43, 57)]):
        write_nvidias(nvidia / f"training_{number}.hdf5", make_rows(size, first))
    theirs = stream(opened(nvidia), masking=POLICY).steps(0)
    for step in [next(theirs) for _ in range(4)]:
        originals = make_rows_of_folder([50, 7, 43])[list(step.rows)]
        for i, batch in enumerate(step.micro_batches):
            restored = torch.where(batch.masked_lm_labels >= 0, batch.masked_lm_labels, batch.input_ids)
            assert np.array_equal(restored.numpy(), originals[3 * i : 3 * i + 3])
    theirs.close()  # type: ignore[attr-defined]


def test_datasets_are_mixed_by_weight(tmp_path: Path) -> None:
    write_ours(tmp_path / "a", [90])
    write_ours(tmp_path / "b", [30], first=90)
    dataset = opened(tmp_path / "a", tmp_path / "b", weights=[1, 3])
    flat = [row for step in rows_of(dataset, 500) for row in step]
    assert abs(sum(row >= 90 for row in flat) / len(flat) - 0.75) < 0.03
    counts = np.bincount(flat)
    assert np.ptp(counts[:90]) <= 1, "within a component every row appears equally often"
    assert np.ptp(counts[90:]) <= 1
    assert rows_of(dataset, 3, first=300 * 6) == rows_of(dataset, 303)[300:]
    options = {"world_size": 3, "micro_batch_size": 1}
    shares = [rows_of(dataset, 60, rank=rank, **options) for rank in range(3)]
    together = [sorted(row for share in shares for row in share[step]) for step in range(60)]
    assert together == [sorted(flat[step * 6 : step * 6 + 6]) for step in range(60)]


def test_datasets_mixed_by_size_give_every_row_once(tmp_path: Path) -> None:
    write_ours(tmp_path / "a", [90])
    write_ours(tmp_path / "b", [30], first=90)
    flat = [row for step in rows_of(opened(tmp_path / "a", tmp_path / "b"), 20) for row in step]
    assert sorted(flat) == list(range(120))


def test_batches_are_prefetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """During a step the next ones are prepared, but no more than PREFETCHED_STEPS."""
    made: list[str] = []
    make, may_go_on = TrainingStream._make_step, threading.Event()

    def make_and_record(self: TrainingStream, *given: object) -> StepBatches:
        made.append(threading.current_thread().name)
        if len(made) > 1 + PREFETCHED_STEPS:
            assert may_go_on.wait(60)
        return make(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(TrainingStream, "_make_step", make_and_record)
    running = stream(opened(folder))
    assert not running.has_next
    iterator = running.steps(0)
    next(iterator)
    deadline = time.monotonic() + 60
    while (len(made) < 1 + PREFETCHED_STEPS or not running.has_next) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert running.has_next
    time.sleep(0.3)
    assert made == ["prefetch_0"] * (1 + PREFETCHED_STEPS), "the one taken and those that wait"
    for _ in range(PREFETCHED_STEPS):  # while the one after them cannot be made
        next(iterator)
    assert not running.has_next
    may_go_on.set()
    iterator.close()  # type: ignore[attr-defined]


def test_an_error_of_the_prefetch_thread_is_raised_unchanged(folder: Path) -> None:
    dataset = opened(folder)
    damaged = bytearray((folder / "training_000.hdf5").read_bytes())
    damaged[len(damaged) // 2 : len(damaged) // 2 + 400] = bytes(400)
    (folder / "training_000.hdf5").write_bytes(damaged)
    iterator = stream(dataset).steps(0)
    with pytest.raises(UserError, match="training_000"):
        list(islice(iterator, 20))


def test_closing_a_stream_ends_its_threads(folder: Path) -> None:
    before = set(threading.enumerate())
    iterator = stream(opened(folder)).steps(0)
    next(iterator)
    started = set(threading.enumerate()) - before
    assert started
    iterator.close()  # type: ignore[attr-defined]
    assert not any(thread.is_alive() for thread in started)


def test_shards_without_masks_can_be_masked_by_the_loader(tmp_path: Path) -> None:
    write_ours(tmp_path / "masked", [9])
    write_ours(tmp_path / "bare", [9], masked=False)
    dataset = opened(tmp_path / "masked", tmp_path / "bare")
    assert len(rows_of(dataset, 1, masking=POLICY)[0]) == 6


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("sizes", [[11, 12], [1], [15, 5]])
def test_evaluation_sees_every_row_once_in_equal_batches(tmp_path: Path, world_size: int, sizes: list[int]) -> None:
    write_ours(tmp_path, sizes, split="validation")
    dataset = opened(tmp_path, split="validation")
    passes = [
        list(evaluation_batches(dataset, rank=rank, world_size=world_size, micro_batch_size=4))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in passes}) == 1
    seen = []
    for batch in (batch for batches in passes for batch in batches):
        assert batch.input_ids.shape == (4, 24)
        real = batch.next_sentence_label >= 0
        seen += (batch.input_ids[real, 1] - 5).tolist()
        assert (batch.masked_lm_labels[~real] == -1).all()
        assert (batch.input_mask[~real].sum(dim=1) == 1).all()
    assert sorted(seen) == list(range(sum(sizes)))
