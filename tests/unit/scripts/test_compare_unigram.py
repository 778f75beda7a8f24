"""The unigram cross entropy."""

import math
from pathlib import Path

import numpy as np
import pytest

from data.shards.dataset import PretrainingDataset
from data.shards.report import text_tokens
from data.shards.schema import Rows
from scripts.compare_unigram import unigram_cross_entropy
from tests.unit.data.shards_on_disk import make_rows, opened, write_shard


def dataset_of(folder: Path, rows: Rows) -> PretrainingDataset:
    write_shard(folder / "training_0.hdf5", rows, {})
    return opened(folder)


def test_unigram_cross_entropy_matches_the_formula(tmp_path: Path) -> None:
    training, validation = make_rows(60, seed=1), make_rows(30, seed=2)
    found = unigram_cross_entropy(dataset_of(tmp_path / "t", training), dataset_of(tmp_path / "v", validation))
    counts = np.bincount(text_tokens(training), minlength=5000)
    targets = validation.masked_lm_ids[validation.masked_lm_positions > 0]
    size = max(targets.max(), text_tokens(training).max()) + 1
    total = counts.sum() + size
    expected = -np.mean([math.log((counts[target] + 1) / total) for target in targets])
    assert found == pytest.approx(expected, rel=1e-9)
