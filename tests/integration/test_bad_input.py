"""A user's mistake: one message, exit code 2, no traceback."""

import json
from pathlib import Path

import pytest

from common.errors import UserError
from deepspeed_train import main
from tests.support import make_rows, run_deepspeed, run_plain, write_nvidia_shard, write_project


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def message_of(words: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        main(words)
    return str(caught.value)


def test_missing_files(tmp_path: Path) -> None:
    words = write_project(tmp_path)
    (tmp_path / "model.json").unlink()
    (tmp_path / "deepspeed.json").unlink()
    message = message_of(words)
    assert f"{tmp_path / 'model.json'}: there is no such file; expected a model JSON (--cf)" in message
    assert f"{tmp_path / 'deepspeed.json'}: there is no such file" in message


def test_typos_in_both_files_are_reported_together(tmp_path: Path) -> None:
    words = write_project(tmp_path, gradient_cliping=1.0)
    content = json.loads((tmp_path / "model.json").read_text())
    content["mixed_seq_training"]["24"]["learning_rat"] = 1e-3
    content["bert_model_config"]["hiden_size"] = 32
    (tmp_path / "model.json").write_text(json.dumps(content))
    message = message_of(words)
    assert "did you mean 'gradient_clipping'?" in message
    assert "did you mean 'learning_rate'?" in message
    assert "did you mean 'hidden_size'?" in message


def test_broken_json(tmp_path: Path) -> None:
    words = write_project(tmp_path)
    (tmp_path / "model.json").write_text('{"name": ')
    assert "is no valid JSON" in message_of(words)
    (tmp_path / "model.json").write_text('{"name": "a", "name": "b"}')
    assert "'name' stands twice" in message_of(words)


def test_unknown_flags(tmp_path: Path) -> None:
    message = message_of([*write_project(tmp_path), "--max_step", "3", "--sede=4"])
    assert "unknown flag '--max_step'; did you mean '--max_steps'?" in message
    assert "unknown flag '--sede=4'; did you mean '--seed'?" in message


def test_wrong_sequence_length(tmp_path: Path) -> None:
    words = write_project(tmp_path)
    write_nvidia_shard(tmp_path / "data" / "wiki_training_7.hdf5", make_rows(5, 16, 4, seed=1))
    message = message_of(words)
    assert "wiki_training_7.hdf5: rows are 16 tokens wide, but --max_seq_length is 24" in message


def test_length_that_the_json_does_not_have(tmp_path: Path) -> None:
    message = message_of([*write_project(tmp_path), "--max_seq_length", "16"])
    assert "mixed_seq_training has no entry for --max_seq_length 16 (found: 24)" in message


def test_empty_and_missing_folder(tmp_path: Path) -> None:
    words = write_project(tmp_path)
    for path in (tmp_path / "data").iterdir():
        path.unlink()
    message = message_of(words)
    assert str(tmp_path / "data") in message
    assert "data.prepare" in message
    (tmp_path / "data").rmdir()
    assert str(tmp_path / "data") in message_of(words)


def test_a_shard_that_is_no_hdf5(tmp_path: Path) -> None:
    words = write_project(tmp_path)
    (tmp_path / "data" / "wiki_training_1.hdf5").write_bytes(b"no HDF5 at all")
    assert "wiki_training_1.hdf5" in message_of(words)


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--load_checkpoint_id", "step_00000001"]
    assert "--load_checkpoint_id needs --load_training_checkpoint" in message_of(words)


def test_process_ends_with_one_message_and_code_two(tmp_path: Path) -> None:
    words = write_project(tmp_path, zero_optimisation={"stage": 1})
    outcome = run_plain(words)
    assert outcome.returncode == 2
    assert outcome.stderr.count("error: ") == 1
    assert "Traceback" not in outcome.stderr
    assert not (tmp_path / "out").exists()


def test_two_ranks_give_one_message_too(tmp_path: Path) -> None:
    words = write_project(tmp_path, zero_optimisation={"stage": 1})
    outcome = run_deepspeed(words, num_ranks=2)
    assert outcome.returncode == 2
    assert outcome.stderr.count("error: ") == 1
    assert "Traceback" not in outcome.stderr
