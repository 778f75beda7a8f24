"""Estimates from opened data."""

from pathlib import Path

import pytest

from data.shards.dataset import open_dataset
from tests.support import make_rows, write_nvidia_shard
from training.inputs.datasets import mean_tokens


def test_tokens_of_a_row(tmp_path: Path) -> None:
    rows = make_rows(30, 24, 4, seed=1)
    write_nvidia_shard(tmp_path / "a_training_0.hdf5", rows)
    data = open_dataset([tmp_path], split="training", max_seq_length=24, max_predictions_per_seq=4)
    assert mean_tokens(data) == pytest.approx(rows["input_mask"].sum() / 30)
