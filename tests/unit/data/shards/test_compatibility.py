"""Datasets of one run must fit together."""

import json
from pathlib import Path

import pytest

from common.errors import UserError
from data.shards.dataset import check_disjoint, check_masked, check_tokenizer
from data.shards.schema import MANIFEST_NAME
from tests.unit.data.shards_on_disk import make_rows, opened, write_nvidias, write_ours


def test_shards_of_two_tokenizers_are_refused(tmp_path: Path) -> None:
    for name, digest in (("a", "one"), ("b", "two")):
        write_ours(tmp_path / name, [5], tokenizer_digest=digest)
    write_nvidias(tmp_path / "c" / "training_0.hdf5", make_rows(5))
    with pytest.raises(UserError, match=r"b/training_000.hdf5: was made with another tokenizer than .*a/training_000"):
        opened(tmp_path / "a", tmp_path / "c", tmp_path / "b")
    mixed = opened(tmp_path / "c", tmp_path / "b")
    assert mixed.tokenizer_digest == "two"
    check_tokenizer([mixed], "two")
    check_tokenizer([mixed], None)
    with pytest.raises(UserError, match="another tokenizer than the model JSON's bert_token_file"):
        check_tokenizer([mixed], "one")
    with pytest.raises(UserError, match="another tokenizer than"):
        check_tokenizer([mixed, opened(tmp_path / "a")], None)


def test_shards_without_masks_are_refused(tmp_path: Path) -> None:
    write_ours(tmp_path / "masked", [9])
    write_ours(tmp_path / "bare", [9], masked=False)
    check_masked(opened(tmp_path / "masked"), "do something")
    with pytest.raises(UserError, match=r"bare/training_000\.hdf5: was prepared without masks .* do something"):
        check_masked(opened(tmp_path / "masked", tmp_path / "bare"), "do something")


def test_validation_data_that_is_also_training_data_is_refused(tmp_path: Path) -> None:
    (path,) = write_ours(tmp_path, [50])
    (other,) = write_ours(tmp_path, [50], split="validation", first=50)
    check_disjoint([opened(tmp_path)], opened(tmp_path, split="validation"))
    other.unlink()
    other.symlink_to(path)
    with pytest.raises(UserError, match=r"validation_000.hdf5: is validation data, but .*training_000.hdf5"):
        check_disjoint([opened(tmp_path)], opened(tmp_path, split="validation"))
    other.unlink()
    other.write_bytes(path.read_bytes())
    digest = {"rows": 50, "bytes": path.stat().st_size, "sha256": "0" * 64}
    manifest = {"files": [{"name": name, **digest} for name in (path.name, other.name)]}
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="is the same file and is training data"):
        check_disjoint([opened(tmp_path)], opened(tmp_path, split="validation"))
