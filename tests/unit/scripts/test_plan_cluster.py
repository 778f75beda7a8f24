"""The command: its tables, its JSON, the file it writes, and what it refuses."""

import json
import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from common.errors import UserError, run_command
from scripts.plan_cluster import main
from tests.support import PROJECT, make_rows, write_json, write_nvidia_shard, write_project
from training.settings.deepspeed_file import load_deepspeed_file

LARGE = ["--cf", str(PROJECT / "configs" / "bert_large.json"), "--max_seq_length", "128"]
ZERO1 = ["--deepspeed_config", str(PROJECT / "configs" / "ds_bf16_zero1.json")]


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_thousand_gpus(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of docs/clusters.md."""
    page = (PROJECT / "docs" / "clusters.md").read_text()
    (line,) = re.findall(r"^    python scripts/plan_cluster.py (.*)$", page, re.MULTILINE)
    monkeypatch.chdir(PROJECT)
    assert main([*shlex.split(line), "--dollars_per_gpu_hour", "2.5"]) == 0
    text = capsys.readouterr().out
    for part in (
        "336,234,306 parameters",
        "128 × 8 H100",
        "memory per rank without activations",
        "--gradient_checkpointing 5",
        "to the end 125,000 steps",
        "GPU hours, $",
        "recommended: ZeRO stage",
        "do not divide its batch on this many ranks",
    ):
        assert part in text


def test_json_agrees_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, *LARGE, *ZERO1, "--gpus", "8x4:A100-80", "--mean_tokens", "110", "--dollars_per_gpu_hour", "2")
    best, end = found["recommended"], found["to_the_end"]
    assert best["fits"]
    assert best["tokens_per_second"] * best["step_seconds"] == pytest.approx(found["tokens_per_step"])
    assert sum(best["memory_gib"].values()) == pytest.approx(best["peak_memory_gib"])
    assert best["micro_batch"] * best["accumulation"] * 32 == found["rows_per_step"] == 4096
    assert end["dollars"] == pytest.approx(2 * end["gpu_hours"])
    assert end["hours"] * 3600 >= end["steps"] * best["step_seconds"]
    assert found["configured"]["micro_batch"] == 64
    assert [row["nodes"] for row in found["scaling"]] == [1, 2, 4]
    assert found["storage"]["checkpoint_bytes"] == pytest.approx(14 * 336_234_306)


def test_more_gpus_are_faster_and_less_efficient(capsys: pytest.CaptureFixture[str]) -> None:
    rows = plan(capsys, *LARGE, *ZERO1, "--gpus", "8x16:H100")["scaling"]
    speeds = [row["tokens_per_second"] for row in rows]
    assert speeds == sorted(speeds)
    assert speeds[-1] < 16 * speeds[0]


def test_lengths_come_from_prepared_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = write_project(tmp_path)
    given = dict(pairwise(words))
    rows = [make_rows(count, 24, 4, seed=index) for index, count in enumerate((37, 5, 22))]
    tokens = sum(int(part["input_mask"].sum()) for part in rows)
    masked = sum(int((part["masked_lm_positions"] > 0).sum()) for part in rows)
    found = plan(
        capsys, "--cf", given["--cf"], "--deepspeed_config", given["--deepspeed_config"], "--gpus", "1:H100",
        "--max_seq_length", "24", "--data_path_prefix", str(tmp_path),
    )  # fmt: skip
    assert found["data"]["num_rows"] == 64
    assert found["data"]["mean"] == pytest.approx(tokens / 64)
    assert found["data"]["mean_masked"] == pytest.approx(masked / 64)
    assert found["storage"]["is_row_size_measured"]


def test_the_written_json_is_one_for_the_launcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "made.json"
    found = plan(capsys, *LARGE, *ZERO1, "--gpus", "8x8:H200", "--write", str(path))
    assert json.loads(path.read_text()) == found["deepspeed_json"]
    assert load_deepspeed_file(path, 64).batch.micro == found["recommended"]["micro_batch"]
    again = plan(capsys, *LARGE, "--deepspeed_config", str(path), "--gpus", "8x8:H200")
    assert again["configured"] == again["recommended"] == found["recommended"]


def test_published_figures_need_no_other_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--published"])
    assert "BERT-large, 128, fp16, A100 | rows/s | 580 |" in capsys.readouterr().out


def test_all_mistakes_at_once(tmp_path: Path) -> None:
    engine = write_json(tmp_path / "ds.json", {"train_batch_size": 100, "zero_optimizatoin": {}})
    with pytest.raises(UserError) as raised:
        main([*LARGE, "--deepspeed_config", str(engine), "--gpus", "8x2:H10", "--mean_tokens", "500"])
    parts = raised.value.parts
    expected = (
        "unknown accelerator 'H10'",
        "zero_optimizatoin",
        "16 ranks",
        "--mean_tokens 500",
    )
    assert all(any(part in found for found in parts) for part in expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*LARGE, *ZERO1, "--gpus", "8by2:H100"], "as in 8x128:H100"),
        ([*LARGE, *ZERO1, "--gpus", "8 x 2:H100"], "as in 8x128:H100"),
        ([*LARGE, *ZERO1], "required: --gpus"),
        ([*LARGE, *ZERO1, "--gpus", "8x1:V100-16"], "does not compute in bf16"),
        ([*LARGE, *ZERO1, "--gpus", "5:H100"], "cannot be divided among 5 ranks"),
        ([*LARGE[:3], "96", *ZERO1, "--gpus", "8:H100"], "no entry for rows of 96 tokens"),
        ([*LARGE, "--deepspeed_config", "missing.json", "--gpus", "8:H100"], "missing.json"),
        ([*LARGE, *ZERO1, "--gpus", "8:H100", "--accelerators", "missing.json"], "missing.json"),
        ([*LARGE, *ZERO1, "--gpus", "8:H100", "--data_path_prefix", "missing"], "no such folder"),
        ([*LARGE, *ZERO1, "--gpus", "8:H100", "--write", "missing/made.json"], "a folder that exists"),
        ([*LARGE, *ZERO1, "--gpus", "8:H100", "--dollars_per_gpu_hour", "0"], "expected a finite number above 0"),
    ],
)
def test_one_message_each(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(words)


def test_a_model_that_fits_nowhere(tmp_path: Path) -> None:
    content = json.loads((PROJECT / "configs" / "bert_large.json").read_text())
    sizes = {"hidden_size": 8192, "num_hidden_layers": 48, "num_attention_heads": 64, "intermediate_size": 32768}
    content["bert_model_config"] |= sizes
    words = ["--cf", str(write_json(tmp_path / "huge.json", content)), "--max_seq_length", "128", *ZERO1]
    with pytest.raises(UserError, match=r"does not fit on 8 × RTX-4090.*It would fit on .*B200"):
        main([*words, "--gpus", "8:RTX-4090"])


def test_the_exit_code_of_a_mistake_is_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["plan_cluster.py", *LARGE, *ZERO1, "--gpus", "8x2:H10"])
    with pytest.raises(SystemExit, match="2"):
        run_command(main)
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith("error: --gpus: unknown accelerator 'H10'; did you mean 'H100'? (known: A100-40")


def test_shards_of_another_width_are_refused(tmp_path: Path) -> None:
    write_nvidia_shard(tmp_path / "hdf5" / "128" / "a_training_0.hdf5", make_rows(4, 24, 4, seed=0))
    with pytest.raises(UserError, match="rows are 24 tokens wide"):
        main([*LARGE, *ZERO1, "--gpus", "8:H100", "--data_path_prefix", str(tmp_path)])
