"""Flags and DeepSpeed blocks that change what a step computes, checked by the losses of tiny runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError
from nvidia.attention.sparsity import SparseAttention
from nvidia.encoder import BertEncoder
from tests.support import read_metrics, write_project
from tests.unit.training.in_process import losses, run_here
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.state import read_state


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(tmp_path_factory.mktemp("plain"))


def test_recomputation_does_not_change_the_loss(plain: list[float], tmp_path: Path) -> None:
    flags = ["--gelu_checkpoint", "--attention_dropout_checkpoint", "--normalize_invertible"]
    assert losses(tmp_path, *flags) == pytest.approx(plain, abs=1e-6)


def test_layer_drop_changes_the_loss_once_it_drops(plain: list[float], tmp_path: Path) -> None:
    block = {"enabled": True, "theta": 0.1, "gamma": 5.0}
    dropped = losses(tmp_path, "--progressive_layer_drop", progressive_layer_drop=block)
    assert dropped[0] == plain[0]  # θ(0) = 1: nothing is dropped yet
    assert dropped[1:] != plain[1:]
    rows = read_metrics(tmp_path, "train")
    assert min(row["model_flops_per_second"] for row in rows) > 0


def test_a_sparse_block_reaches_the_model_and_the_checkpoint(
    plain: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block = {"mode": "fixed", "block": 4, "num_local_blocks": 2, "num_random_blocks": 1, "local_window_blocks": [4]}
    sparse = losses(tmp_path, "--deepspeed_sparse_attention", sparse_attention=block)
    assert all(abs(ours - theirs) > 1e-6 for ours, theirs in zip(sparse, plain, strict=True))
    assert "local_window_blocks, num_random_blocks belong to other modes than 'fixed'" in capsys.readouterr().err
    checkpoints = CheckpointFolder(tmp_path / "out" / "saved_models" / "tiny")
    config = read_state(checkpoints.folder / checkpoints.choose(None)).model_config
    assert config["sparse_attention"] == SparseAttention.from_dict(block).to_dict()
    assert config["sparse_attention"]["num_local_blocks"] == 2


def test_deepspeeds_autocast_block_trains(plain: list[float], tmp_path: Path) -> None:
    found = losses(tmp_path, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    assert found != plain
    assert found == pytest.approx(plain, rel=2e-2)


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks were recomputed together, for each forward pass with gradient checkpointing."""
    noted: list[int] = []
    run = BertEncoder.run_checkpointed

    def note(self: BertEncoder, *arguments: Any) -> Any:
        noted.append(self.checkpoint_chunk)
        return run(self, *arguments)

    monkeypatch.setattr(BertEncoder, "run_checkpointed", note)
    return noted


def test_gradient_checkpointing_does_not_change_the_loss(plain: list[float], chunks: list[int], tmp_path: Path) -> None:
    assert losses(tmp_path, "--gradient_checkpointing", "1") == plain  # to the last bit
    assert chunks == [1] * 5


def test_gradient_checkpointing_takes_the_root_of_the_depth_by_default(chunks: list[int], tmp_path: Path) -> None:
    words = write_project(tmp_path)
    content = json.loads((tmp_path / "model.json").read_text())
    content["bert_model_config"]["num_hidden_layers"] = 5
    (tmp_path / "model.json").write_text(json.dumps(content))
    run_here([*words, "--max_steps", "1", "--gradient_checkpointing"])
    assert chunks == [3]


@pytest.mark.parametrize("kind", ["Lamb", "Muon", "Adam"])
def test_optimizers_train_through_the_engine(kind: str, plain: list[float], tmp_path: Path) -> None:
    other = losses(tmp_path, optimizer={"type": kind, "params": {"betas": [0.9, 0.95]}})
    assert other[0] == pytest.approx(plain[0], abs=1e-6)
    assert other[2:] != plain[2:]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--deepspeed_sparse_attention"], "needs a block 'sparse_attention'"),
        (["--deepspeed_transformer_kernel"], "needs CUDA"),
        (["--normalize_invertible", "--no-preln"], "saves no memory"),
    ],
)
def test_a_flag_that_cannot_do_what_it_says_is_refused(flags: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        run_here([*write_project(tmp_path), *flags])


def test_names_inside_the_blocks_are_checked(tmp_path: Path) -> None:
    words = write_project(
        tmp_path,
        zero_optimization={"stage": 2, "overlap_com": True},
        fp16={"enabled": False, "loss_scale_windo": 3},
        progressive_layer_drop={"theta": 2.0},
    )
    with pytest.raises(UserError) as caught:
        run_here(words)
    message = str(caught.value)
    assert "unknown key 'zero_optimization.overlap_com'; did you mean 'overlap_comm'?" in message
    assert "unknown key 'fp16.loss_scale_windo'; did you mean 'loss_scale_window'?" in message
    assert "progressive_layer_drop.theta: found 2.0" in message
    assert json.loads((tmp_path / "deepspeed.json").read_text())["zero_optimization"]["stage"] == 2
