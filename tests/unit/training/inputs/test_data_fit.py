"""Data must fit the model: labels mean what the sentence head learns, and segments have an embedding."""

import json
from pathlib import Path
from typing import Any

import h5py
import pytest

from common.errors import UserError
from data.shards.dataset import open_dataset
from data.shards.schema import ATTRIBUTE, FORMAT_VERSION
from nvidia.config import BertConfig
from tests.support import make_rows, write_nvidia_shard
from training.inputs.datasets import check_fit


def write(folder: Path, objective: str | None) -> Path:
    rows = make_rows(9, 24, 4, seed=1)
    if objective == "mlm":
        rows["segment_ids"][:] = 0
    path = folder / "wiki_training_0.hdf5"
    write_nvidia_shard(path, rows)
    if objective is not None:
        with h5py.File(path, "a") as file:
            file.attrs[ATTRIBUTE] = json.dumps({"format_version": FORMAT_VERSION, "objective": objective})
    return folder


def check(*folders: Path, **model: Any) -> None:
    data = open_dataset(folders, split="training", max_seq_length=24, max_predictions_per_seq=4)
    check_fit(data, BertConfig(vocab_size=61, **model))


@pytest.mark.parametrize(("objective", "head"), [("nsp", "sop"), ("sop", "nsp")])
def test_labels_of_another_objective_are_refused(objective: str, head: str, tmp_path: Path) -> None:
    folders = [write(tmp_path / "elsewhere", None), write(tmp_path / "ours", objective)]
    with pytest.raises(UserError, match=rf"ours/wiki_training_0.hdf5: .*{objective}.* sentence_head is '{head}'"):
        check(*folders, sentence_head=head)
    check(*folders, sentence_head=objective)


@pytest.mark.parametrize("head", ["nsp", "sop", "none"])
def test_shards_without_pairs_or_without_an_objective_fit_any_head(head: str, tmp_path: Path) -> None:
    check(write(tmp_path / "elsewhere", None), write(tmp_path / "ours", "mlm"), sentence_head=head)
    check(write(tmp_path / "pairs", "sop"), sentence_head="none")


def test_two_segments_need_two_embeddings(tmp_path: Path) -> None:
    folders = [write(tmp_path / "single", "mlm"), write(tmp_path / "pairs", None)]
    check(folders[0], type_vocab_size=1)
    with pytest.raises(UserError, match=r"pairs/wiki_training_0.hdf5: has rows with two segments, but .* is 1; set"):
        check(*folders, type_vocab_size=1)
    check(*folders, type_vocab_size=2)
