"""Every shipped JSON file loads as the kind of file that its name says."""

from pathlib import Path

import pytest

from tests.support import PROJECT
from training.settings.deepspeed_file import load_deepspeed_file
from training.settings.model_file import load_model_file

SHIPPED = sorted([*PROJECT.glob("*.json"), *(PROJECT / "configs").glob("*.json")])


def is_for_deepspeed(path: Path) -> bool:
    return path.name.startswith("ds_")


@pytest.mark.parametrize("path", [path for path in SHIPPED if is_for_deepspeed(path)], ids=lambda path: path.name)
@pytest.mark.parametrize("world_size", [1, 8])
def test_deepspeed_files_load(path: Path, world_size: int) -> None:
    file = load_deepspeed_file(path, world_size)
    assert file.batch.total == file.batch.micro * file.batch.accumulation * world_size


@pytest.mark.parametrize("world_size", [1, 8, 64, 512])
def test_the_large_batch_recipes_have_the_batch_of_their_names_on_any_number_of_ranks(world_size: int) -> None:
    for name, rows in (("64k", 65536), ("32k", 32768)):
        batch = load_deepspeed_file(PROJECT / "configs" / f"ds_lamb_{name}.json", world_size).batch
        assert (batch.total, batch.micro * batch.accumulation * world_size) == (rows, rows)


@pytest.mark.parametrize("path", [path for path in SHIPPED if not is_for_deepspeed(path)], ids=lambda path: path.name)
def test_model_files_load(path: Path) -> None:
    file = load_model_file(path)
    assert file.name == path.stem
    assert set(file.mixed_seq_training) == set(file.data.mixed_seq_datasets)
