"""Flags and DeepSpeed blocks take effect: checked by the figures of tiny runs."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.errors import UserError
from nvidia.attention.sparsity import SparseAttention
from nvidia.encoder import BertEncoder
from tests.support import make_rows, read_metrics, write_nvidia_shard, write_project
from tests.unit.training.in_process import run_here
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.state import read_state
from training.engine.build import all_ranks_take_step
from training.engine.gradients import GradientWatch
from training.inputs.datasets import open_data
from training.metrics.window import MetricsWindow
from training.runtime import collectives
from training.runtime.ranks import RankInfo
from training.settings.flags import read_arguments
from training.settings.resolve import resolve_settings
from training.validation import validation_rows


def losses(folder: Path, *flags: str, **deepspeed: Any) -> list[float]:
    run_here([*write_project(folder, **deepspeed), "--max_steps", "5", *flags])
    return [row["loss"] for row in read_metrics(folder, "train")]


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


def test_weights_of_datasets_reach_the_stream(tmp_path: Path) -> None:
    words = write_project(tmp_path)
    shutil.copytree(tmp_path / "data", tmp_path / "other")
    content = json.loads((tmp_path / "model.json").read_text())
    content["data"]["mixed_seq_datasets"]["24"]["other"] = "other"
    content["data"]["mixed_seq_weights"] = {"24": {"other": 1, "wiki": 3}}  # in another order than the datasets
    (tmp_path / "model.json").write_text(json.dumps(content))
    place = RankInfo(0, 0, 1, 1)
    (data,) = open_data(resolve_settings(read_arguments(words)[0], place).data, place).training
    assert data.weights == (3.0, 1.0)
    run_here([*words, "--max_steps", "20"])
    assert read_metrics(tmp_path, "train")[-1]["epoch"] == pytest.approx(20 * 8 / data.num_rows)


def test_validation_shards_with_the_other_suffix_are_found(tmp_path: Path) -> None:
    words = write_project(tmp_path)
    (tmp_path / "held_out" / "24").mkdir(parents=True)
    (tmp_path / "data" / "wiki_test_0.hdf5").rename(tmp_path / "held_out" / "24" / "wiki_test_0.h5")
    content = json.loads((tmp_path / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps({**content, "validation": {"path": "held_out"}}))
    place = RankInfo(0, 0, 1, 1)
    validation = open_data(resolve_settings(read_arguments(words)[0], place).data, place).validation
    assert validation is not None
    assert [path.name for path in validation.files] == ["wiki_test_0.h5"]


def test_validation_rows_may_have_another_length_and_number_of_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same rows, padded to less and to more than the 24 tokens of training, have the same loss."""
    words = write_project(tmp_path)
    rows = make_rows(11, 16, 4, seed=9)
    found = []
    for width in (16, 32):
        added = dict.fromkeys(("input_ids", "input_mask", "segment_ids"), width - 16)
        added |= dict.fromkeys(("masked_lm_positions", "masked_lm_ids"), 2)
        wide = {name: np.pad(rows[name], ((0, 0), (0, more))) for name, more in added.items()}
        write_nvidia_shard(tmp_path / "held_out" / str(width) / "wiki_test_0.hdf5", rows | wide)
        content = json.loads((tmp_path / "model.json").read_text())
        content["validation"] = {"path": f"held_out/{width}"}
        (tmp_path / "model.json").write_text(json.dumps(content))
        run_here([*words, "--max_steps", "1", "--job_name", f"at_{width}"])
        assert f"validation   11 rows of {width} in 1 file" in capsys.readouterr().out
        found.append(read_metrics(tmp_path, "validation", f"at_{width}")[-1]["mlm_loss"])
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def test_longer_rows_are_validated_fewer_at_a_time() -> None:
    assert [validation_rows(64, 128, length) for length in (64, 128, 512, 100_000)] == [64, 64, 16, 1]


def test_a_folder_without_validation_shards_means_no_validation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`data.prepare` writes such a folder when the text is one document."""
    words = write_project(tmp_path)
    (tmp_path / "data" / "wiki_test_0.hdf5").unlink()
    assert resolve_settings(read_arguments(words)[0], RankInfo(0, 0, 1, 1)).validation_folder is None
    assert "training without validation" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["Lamb", "Muon", "Adam"])
def test_optimizers_train_through_the_engine(kind: str, plain: list[float], tmp_path: Path) -> None:
    other = losses(tmp_path, optimizer={"type": kind, "params": {"betas": [0.9, 0.95]}})
    assert other[0] == pytest.approx(plain[0], abs=1e-6)
    assert other[2:] != plain[2:]


def test_figures_of_a_run_are_complete_and_plausible(tmp_path: Path) -> None:
    losses(tmp_path, train_micro_batch_size_per_gpu=2)
    for row in read_metrics(tmp_path, "train"):
        assert 0 < row["grad_norm"] < 100
        assert 0 < row["padding_share"] < 0.5
        assert 0.01 < row["masking_rate"] < 0.4
        assert 0 < row["matmul_share"] < 1
        assert row["memory_gib"] > 0.05
        split = sum(row[key] for key in row if key.startswith("seconds_") and key != "seconds_per_step")
        pauses = row["seconds_checkpoint"] + row["seconds_validation"]
        assert split - pauses == pytest.approx(row["seconds_per_step"] * row["window_steps"], rel=1e-3)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_bf16_norm_is_that_of_fp32(stage: int, tmp_path: Path) -> None:
    norms = []
    for precision in ("fp32", "bf16"):
        losses(tmp_path / precision, "--precision", precision, zero_optimization={"stage": stage})
        norms.append([row["grad_norm"] for row in read_metrics(tmp_path / precision, "train")])
    assert norms[1] == pytest.approx(norms[0], rel=0.1)


@pytest.mark.parametrize("print_steps", ["1", "3"])
def test_gradients_are_watched_for_the_first_steps_only(
    print_steps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks: list[int] = []
    end_step = GradientWatch.end_step

    def note(self: GradientWatch) -> list[str]:
        names = end_step(self)
        hooks.append(sum(handle.id in handle.hooks_dict_ref() for handle in self.handles))
        return names

    monkeypatch.setattr(GradientWatch, "end_step", note)
    losses(tmp_path, "--print_steps", print_steps)
    assert hooks[0] > 0
    assert hooks[1:] == [0] * 4


def test_the_best_checkpoint_is_kept_beside_the_last(tmp_path: Path) -> None:
    flags = ["--max_steps", "9", "--validate_every_steps", "1", "--keep_best", "--keep_last", "1"]
    run_here([*write_project(tmp_path), *flags])
    rows = read_metrics(tmp_path, "validation")
    lowest = min(rows, key=lambda row: row["mlm_loss"])
    checkpoints = CheckpointFolder(tmp_path / "out" / "saved_models" / "tiny")
    best = checkpoints.best()
    assert best is not None
    assert best.tag == f"step_{lowest['step']:08d}"
    assert best.mlm_loss == lowest["mlm_loss"]
    assert checkpoints.tags() == sorted({best.tag, "step_00000009"})


def test_dry_run_reports_the_cost_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.banner.find_attention_notes", lambda config, *_: [f"heads of {config.head_size}"])
    # Kibibytes instead of GiB: the parts of a model this small would all be 0.00.
    monkeypatch.setattr(
        "training.dry_run._gib", lambda tensors: sum(t.numel() * t.element_size() for t in tensors) / 1024
    )
    run_here([*write_project(tmp_path, train_micro_batch_size_per_gpu=4), "--dry_run"])
    said = capsys.readouterr().out
    for row in START_TABLE:
        assert re.search(row.format(folder=re.escape(str(tmp_path))), said, re.MULTILINE), row
    assert "note: heads of 16" in said
    parameters = float(re.findall(r"([\d,]+) parameters", said)[0].replace(",", ""))
    parts = re.search(
        r"GiB per rank at its peak: parameters (.*), gradients (.*), optimizer (.*), activations and", said
    )
    assert parts
    sizes = [float(part) for part in parts.groups()]
    assert sizes == pytest.approx([4 * parameters / 1024, 4 * parameters / 1024, 8 * parameters / 1024], rel=0.01)
    assert re.search(r"speed +[\d.]+ s/step, [\d,]+ tokens/s, matmul \d+%", said)
    assert re.search(r"left +60 steps, \d+:\d\d:\d\d \(hours:minutes:seconds\), about [\d.]+ k tokens", said)
    assert not (tmp_path / "out").exists()


START_TABLE = (
    r"^tiny$",
    r"^  model +pre-LN, 2 layers of 32, 61 tokens, [\d,]+ parameters$",
    r"^  batch +8 rows of 24: 4 × 2 micro-steps × 1 rank$",
    r"^  data +64 rows of 24 in 3 files, about 1\.\d k tokens$",
    r"^  validation +11 rows of 24 in 1 file$",
    r"^  length +to step 60: 7\.50 epochs, about [89]\.\d k tokens left$",
    r"^  engine +fp32, ZeRO stage 0, cpu, (1 thread|\d+ threads) per rank$",
    r"^  lr +LE, peak 0\.003$",
    r"^  checkpoints +{folder}/out/saved_models/tiny$",
    r"^  logs +{folder}/out/runs/tiny$",
    r"^  start +from new weights$",
)


def test_dry_run_with_monitors_writes_nothing_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monitors = {
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path / "csv")},
        "tensorboard": {"enabled": True, "output_path": str(tmp_path / "events")},
    }
    words = write_project(tmp_path, **monitors)
    before = set(tmp_path.rglob("*"))
    run_here([*words, "--dry_run"])
    assert "nothing was written" in capsys.readouterr().out
    assert set(tmp_path.rglob("*")) == before


def test_dry_run_with_steps_that_grow_and_with_a_time_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step has 8 rows, the other 59 have 80: ten times the time and tokens."""
    monkeypatch.setattr("training.dry_run.fastest_step", lambda *_: 1.0)
    words = write_project(tmp_path, train_micro_batch_size_per_gpu=8)
    run_here([*words, "--dry_run", "--batch_schedule", "0:8,1:80"])
    said = capsys.readouterr().out
    assert "60 steps, 0:09:51 (hours:minutes:seconds)" in said
    tokens = re.search(r"seconds\), about ([\d.]+) k tokens", said)
    assert tokens
    assert float(tokens.group(1)) == pytest.approx((8 + 59 * 80) * 18.4 / 1000, rel=0.1)

    run_here([*words, "--dry_run", "--time_budget", "1000s"])
    said = capsys.readouterr().out
    assert "800 steps, 0:13:20" in said, "100 epochs, although there is time for more"
    assert "num_epochs ends the run in about 13:20, but its time budget allows for" in said
    assert "warm-up" not in said
    run_here([*words, "--dry_run", "--time_budget", "100s"])
    said = capsys.readouterr().out
    assert re.search(r"left +about (89|9\d) steps, 0:01:3\d", said), said
    assert "1:40 in total, 1:3" in said
    assert "num_epochs ends" not in said


def test_the_live_bar_before_the_first_report_and_its_time_to_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)
    monkeypatch.setattr("tqdm.std.tqdm.set_postfix_str", lambda _self, text, refresh=True: texts.append(text))
    monkeypatch.setattr("training.metrics.window.READ_SECONDS", 0.0)
    monkeypatch.setattr(MetricsWindow, "seconds_per_step", lambda _self: 1.0)
    losses(tmp_path, "--print_steps", "3", "--save_every_minutes", "100", "--max_steps_per_epoch", "4")
    assert [re.sub(r"[\d.]+ so far  lr .*  first", "… first", text) for text in texts[:2]] == [
        "epoch 0.12  loss … first report at step 3",
        "epoch 0.25  loss … first report at step 3",
    ]
    assert "next save in" in texts[2]


def test_a_terminal_gets_a_live_bar(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)
    losses(tmp_path)
    line = capsys.readouterr().err.rsplit("\r", 1)[-1]
    for words in ("5/5", "epoch 0.6", "loss ", "lr ", "ETA 0:00", "next save in 0:00"):
        assert words in line
    assert re.search(r"[\d,]+ tokens/s  matmul \d+%", line)


def test_nothing_waits_for_the_device_at_a_micro_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step reads one value from a tensor, whether the gradient is finite, with one micro-step or with four."""
    counts: list[int] = []

    def counted_step(*given: Any) -> None:
        with ReadValues() as read:
            all_ranks_take_step(*given)
        counts.append(read.num)

    monkeypatch.setattr("training.loop.all_ranks_take_step", counted_step)
    for micro in (8, 2):
        words = write_project(tmp_path / str(micro), train_micro_batch_size_per_gpu=micro)
        model = tmp_path / str(micro) / "model.json"  # dropout on a CPU reads its seeds from a host tensor
        model.write_text(
            model.read_text().replace(
                '"hidden_size"', '"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "hidden_size"'
            )
        )
        run_here([*words, "--max_steps", "3"])
    assert counts == [1] * 6


def test_requests_are_exchanged_once_per_step_whatever_the_number_of_micro_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchanges, ask = [], collectives.all_ranks_any

    def count(*flags: bool) -> list[bool]:
        exchanges.append(flags)
        return ask(*flags)

    monkeypatch.setattr(collectives, "all_ranks_any", count)
    # Whether a step is read ahead depends on the machine: without it the reader asks before each step, too.
    monkeypatch.setattr("data.stream.loader.TrainingStream.has_next", property(lambda _self: False))
    counts = []
    for micro in (8, 1):
        folder = tmp_path / str(micro)
        words = write_project(folder, train_micro_batch_size_per_gpu=micro)
        content = json.loads((folder / "model.json").read_text())
        del content["validation"]  # whose exchanges follow its own batches
        (folder / "model.json").write_text(json.dumps(content))
        exchanges.clear()
        run_here([*words, "--max_steps", "5", "--ckpt_to_save", "99"])
        counts.append(len(exchanges))
    assert counts[0] == counts[1]


class ReadValues(TorchDispatchMode):
    """Counts item(), float(), bool() and tolist() of tensors, which all wait for the device."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_head_without_gradient_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shards without masked tokens train the sentence head only."""
    words = write_project(tmp_path)
    for path in (tmp_path / "data").glob("*training*"):
        with h5py.File(path, "r+") as file:
            file["masked_lm_positions"][:] = 0
            file["masked_lm_ids"][:] = 0
    run_here([*words, "--max_steps", "3"])
    warnings = capsys.readouterr().err
    assert "parameters got no gradient in the first steps: cls.predictions" in warnings
    assert warnings.count("got no gradient") == 1


def test_library_logs_are_in_a_file_and_not_on_the_console(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    losses(tmp_path)
    said = capfd.readouterr()
    assert "DeepSpeed info" not in said.out + said.err
    assert "DeepSpeed info" in (tmp_path / "out" / "runs" / "tiny" / "logs" / "rank_0.log").read_text()


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
