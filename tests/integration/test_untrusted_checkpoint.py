"""An untrusted checkpoint cannot run code, whichever of its files contains it."""

import io
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from common.errors import UserError
from tests.rank_server import RankServer
from tests.support import write_project
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.manifest import write_manifest
from training.engine.checkpoint_files import read_file
from training.export.hugging_face import read_weights


class Attack:
    """Unpickled, it makes the file `marker`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def poison(path: Path, marker: Path) -> None:
    """Put the attack into a .pt file among its own content, and make the manifest agree, as an attacker would."""
    content = torch.load(path, weights_only=False)
    content["extra"] = Attack(marker)
    torch.save(content, path)
    (path.parent / "manifest.json").unlink()
    write_manifest(path.parent)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_no_file_of_a_checkpoint_runs_code(stage: int, rank_server: RankServer, tmp_path: Path) -> None:
    words = write_project(tmp_path, zero_optimization={"stage": stage})
    assert rank_server.run([*words, "--max_steps", "2"], 1, tmp_path).codes == [0]
    good = tmp_path / "out" / "saved_models" / "tiny" / "step_00000002"
    kept = shutil.copytree(good, tmp_path / "kept")
    names = sorted(path.name for path in good.glob("*.pt"))
    assert names
    for name in names:
        marker = tmp_path / f"ran_{name}"
        poison(good / name, marker)
        outcome = rank_server.run([*words, "--max_steps", "3"], 1, tmp_path)
        assert outcome.codes == [2], outcome.text
        assert f"{name}: is refused" in outcome.text
        assert "Traceback" not in outcome.text
        with pytest.raises(UserError, match="is refused"):
            read_weights(good)
        assert not marker.exists()
        torch.load(good / name, weights_only=False)  # the attack is a real one
        assert marker.exists()
        shutil.rmtree(good)
        shutil.copytree(kept, good)


def test_a_pickle_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    path, marker = tmp_path / "mp_rank_00_model_states.pt", tmp_path / "ran"
    path.write_bytes(pickle.dumps(Attack(marker)))
    with pytest.raises(UserError, match="mp_rank_00_model_states"):
        read_file(path)
    assert not marker.exists()


def test_an_archive_of_garbage_is_refused(tmp_path: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02garbage")
        archive.writestr("archive/version", "3")
    path = tmp_path / "x.pt"
    path.write_bytes(stream.getvalue())
    with pytest.raises(UserError, match=r"x\.pt"):
        read_file(path)


@pytest.mark.parametrize("tag", ["../other", "/etc", "..", "", "a/b", ".saving"])
def test_a_tag_cannot_leave_the_folder(tag: str, tmp_path: Path) -> None:
    outside = tmp_path / "other"
    outside.mkdir()
    (tmp_path / "run").mkdir()
    (outside / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="has no checkpoint"):
        CheckpointFolder(tmp_path / "run").choose(tag)


def test_the_pointer_is_not_believed(rank_server: RankServer, tmp_path: Path) -> None:
    """`latest` is for DeepSpeed's tools; what we load is found by its manifest."""
    words = write_project(tmp_path)
    assert rank_server.run([*words, "--max_steps", "2"], 1, tmp_path).codes == [0]
    run = tmp_path / "out" / "saved_models" / "tiny"
    (run / "latest").write_text("../../../elsewhere")
    assert CheckpointFolder(run).newest_valid() == "step_00000002"


def test_a_link_out_of_the_folder_is_no_checkpoint(tmp_path: Path) -> None:
    outside, run = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    run.mkdir()
    (outside / "bert_pretraining.json").write_text("{}")
    write_manifest(outside)
    (run / "step_00000001").symlink_to(outside)
    assert CheckpointFolder(run).newest_valid() is None
