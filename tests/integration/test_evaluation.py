"""evaluation.run and evaluation.compare, from files to reports, with tiny stock models."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from common.errors import UserError
from common.processes import STOPPED_EXIT_CODE
from evaluation import compare, run, runner
from evaluation.results import find_card_section
from tests.support import PROJECT
from tests.unit.evaluation.tiny import NOUNS, make_tokenizer, save_model, write_pairs, write_reviews

QUICK = ["--epochs", "5", "--learning_rate", "3e-3", "--batch_size", "8", "--warmup", "0.1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, a labelled table and minimal pairs."""
    root = tmp_path_factory.mktemp("evaluation")
    save_model(root / "ours", pre_ln=True)
    save_model(root / "bert", pre_ln=False)
    write_reviews(root / "reviews.csv")
    (root / "blimp").mkdir()
    write_pairs(root / "blimp" / "order.jsonl")
    return root


@pytest.fixture(scope="module")
def finished(folder: Path) -> Path:
    """The output of one whole run."""
    assert run.main(words(folder)) == 0
    return folder / "out"


def words(folder: Path) -> list[str]:
    return [
        *("--model", str(folder / "ours"), f"theirs={folder / 'bert'}"),
        *("--tasks", str(folder / "reviews.csv"), "blimp", "--text", "text", "--label", "stars"),
        *("--data", str(folder), "--output", str(folder / "out"), "--seeds", "2", "--keep_models", *QUICK),
    ]


def read_report(output: Path) -> dict[str, Any]:
    return json.loads((output / "report.json").read_text())


def result_of(report: dict[str, Any], task: str, model: str, untrained: bool = False) -> dict[str, Any]:
    (entry,) = (item for item in report["tasks"] if item["name"] == task)
    (found,) = (item for item in entry["results"] if item["model"] == model and item["untrained"] == untrained)
    return found


def test_a_run_reports_scores_with_all_that_makes_them_readable(finished: Path) -> None:
    report = read_report(finished)
    assert report["protocol"]["name"] == "fixed"
    for model in ("ours", "theirs"):
        found = result_of(report, "reviews", model)
        summary = found["summary"]["accuracy"]
        assert summary["mean"] > 0.9
        assert summary["low"] <= summary["mean"] <= summary["high"]
        assert found["seeds"] == [1, 2]
        assert len(found["values"]["macro_f1"]) == 2
        assert result_of(report, "reviews", model, untrained=True)["seeds"] == [1]
        pairs = result_of(report, "blimp", model)
        assert pairs["scorer"] == "packed"
        assert set(pairs["groups"]) == {"group0", "group1"}
    (task,) = (item for item in report["tasks"] if item["name"] == "reviews")
    assert task["majority"]["accuracy"] == pytest.approx(0.5, abs=0.1)
    assert (task["num_train"], task["num_rows"]) == (108, 12)
    text = (finished / "report.md").read_text()
    assert "Protocol `fixed`" in text
    assert "| reviews | accuracy | 12 |" in text
    assert re.search(r"\| reviews \| accuracy .* ± .*\], few rows \| [^±]*, few rows \|", text)  # trained, untrained
    assert "over 2 seeds (one score where nothing is trained) and, in brackets" in text
    assert "fine-tuned alike, with 1 seed." in text
    assert "reviews: scored on 12 rows of held_out" in text
    means = [result_of(report, name, "ours")["summary"]["accuracy"]["mean"] for name in ("reviews", "blimp")]
    assert report["averages"]["ours"] == pytest.approx(sum(means) / 2)
    assert "held out of training" in text
    section = (finished / "model_card_ours.md").read_text()
    assert "| BLiMP | accuracy | 20 |" in section
    assert find_card_section([finished / "lost.json", finished / "report.json"], finished.parent / "ours") == section
    for name in ("scores.png", "blimp_groups.png"):
        assert (finished / name).read_bytes().startswith(b"\x89PNG")


def test_kept_models_load_in_stock_transformers_and_know_their_classes(finished: Path) -> None:
    from transformers import pipeline

    kept = sorted((finished / "models" / "ours").iterdir())
    assert len(kept) == 2
    classify = pipeline("text-classification", model=str(kept[0]), device="cpu")
    assert classify('good, "bird" the cat sees the dog .')[0]["label"] == "5"
    assert classify('bad, "bird" the cat sees the dog .')[0]["label"] == "1"


def test_a_second_run_keeps_finished_cells_and_redoes_damaged_ones(
    folder: Path, finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read_report(finished)
    damaged = finished / result_of(before, "reviews", "theirs")["cells"][1]
    damaged.write_text(damaged.read_text()[:-200])
    with monkeypatch.context() as patch:
        patch.setattr(runner, "all_ranks_fine_tune", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
        assert run.main(words(folder)) == STOPPED_EXIT_CODE
    assert re.search(r"stopped by SIGTERM: \d finished cells below .* to resume", capsys.readouterr().err)
    assert run.main(words(folder)) == 0
    output = capsys.readouterr()
    assert "1 cell computed, 9 kept from before" in output.out
    assert "1 damaged or half-written cell below" in output.err
    for key in ("values", "summary"):
        assert result_of(read_report(finished), "reviews", "theirs")[key] == result_of(before, "reviews", "theirs")[key]


def test_two_models_side_by_side(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([str(finished), "--output", str(tmp_path / "table.json")]) == 0
    shown = capsys.readouterr().out
    assert "| reviews | accuracy | 12 | 2 |" in shown
    lines = json.loads((tmp_path / "table.json").read_text())["lines"]
    report = read_report(finished)
    means = [result_of(report, "blimp", model)["summary"]["accuracy"]["mean"] for model in ("ours", "theirs")]
    (pairs,) = (line for line in lines if (line["task"], line["metric"]) == ("BLiMP", "accuracy"))
    assert pairs["difference"] == pytest.approx(means[1] - means[0])
    assert compare.main([f"{finished}:theirs", f"{finished}:theirs"]) == 0
    with pytest.raises(UserError, match=r"no model 'their'; did you mean 'theirs'"):
        compare.main([f"{finished}:their", str(finished)])
    with pytest.raises(UserError, match="no_run: no such folder"):
        compare.main([str(finished), str(tmp_path / "no_run")])


def write_task(path: Path, **content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_sweep_chooses_on_rows_held_out_of_train(folder: Path, tmp_path: Path) -> None:
    write_reviews(tmp_path / "train.csv", 80)
    write_reviews(tmp_path / "dev.csv", 20, seed=1)
    task = write_task(
        tmp_path / "mine.json", kind="classify", format="csv", metrics=["accuracy"], train="train.csv", dev="dev.csv",
        columns={"text": "text", "label": "stars"},
    )  # fmt: skip
    output = tmp_path / "out"
    assert run.main(
        ["--model", str(folder / "ours"), "--tasks", str(task), "--data", str(tmp_path), "--output", str(output),
         "--seeds", "1", "--untrained_seeds", "0", "--protocol", "sweep", *QUICK,
         "--sweep_learning_rates", "1e-7", "3e-3", "--sweep_batch_sizes", "8"]
    ) == 0  # fmt: skip
    found = result_of(read_report(output), "mine", "ours")
    assert found["setting"]["learning_rate"] == 3e-3
    assert [item["setting"]["learning_rate"] for item in found["selection"]] == [1e-7, 3e-3]
    cells = sorted((output / "cells" / "ours").iterdir())
    selecting = [json.loads(path.read_text())["result"] for path in cells if "select" in path.name]
    assert [list(result["scores"]) for result in selecting] == [["selection"]] * 2
    assert all(len(result["predictions"]["selection"]) == 8 for result in selecting)
    assert len(cells) == 3


def test_transfer_starts_from_the_other_tasks_model(folder: Path, tmp_path: Path) -> None:
    write_reviews(tmp_path / "a.csv", 120)
    write_reviews(tmp_path / "few.csv", 12)
    common: dict[str, Any] = {"kind": "classify", "format": "csv", "metrics": ["accuracy"], "dev": "a.csv",
                              "columns": {"text": "text", "label": "stars"}}  # fmt: skip
    tasks = [
        write_task(tmp_path / "second.json", train="few.csv", starts_from="first", **common),
        write_task(tmp_path / "first.json", train="a.csv", **common),
    ]
    output = tmp_path / "out"
    words = ["--model", str(folder / "bert"), "--tasks", *map(str, tasks), "--data", str(tmp_path), "--seeds", "1",
             "--untrained_seeds", "0", *QUICK]  # fmt: skip
    assert run.main([*words, "--output", str(output), "--protocol", "transfer"]) == 0
    # Twelve rows teach little; what it knows it has from the first task.
    assert result_of(read_report(output), "second", "bert")["values"]["accuracy"][0] > 0.9


def test_what_would_end_a_run_late_is_found_before_anything_is_computed(folder: Path, tmp_path: Path) -> None:
    gaps = [{"text": "the ___ sees", "answer": "cat"}, {"text": "the ___ sees the ___", "answer": "cat"}]
    (tmp_path / "gaps.jsonl").write_text("\n".join(map(json.dumps, gaps)))
    write_reviews(tmp_path / "few.csv", 8)
    tasks = [
        write_task(tmp_path / "gaps.json", kind="cloze", format="jsonl", metrics=["accuracy"], dev="gaps.jsonl",
                   columns={"text": "text", "answer": "answer"}),
        write_task(tmp_path / "few.json", kind="classify", format="csv", metrics=["accuracy"], train="few.csv",
                   dev="few.csv", columns={"text": "text", "label": "stars"}, starts_from="fwe"),
    ]  # fmt: skip
    words = ["--model", str(folder / "ours"), "--tasks", *map(str, tasks), "--data", str(tmp_path), "--output"]
    with pytest.raises(UserError) as caught:
        run.main([*words, str(tmp_path / "out"), "--protocol", "sweep"])
    assert "task gaps, dev, line 2: has 2 gaps" in str(caught.value)
    assert "task few: found 8 rows, expected at least 10" in str(caught.value)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"\"starts_from\" names 'fwe', which is not among the tasks; did you mean"):
        run.main([*words, str(tmp_path / "out"), "--protocol", "transfer"])


def test_tags_and_spans_from_files_to_scores(folder: Path, tmp_path: Path) -> None:
    lines = [f"the O\n{noun} B-X\nsees O\n\n" for noun in NOUNS] * 4
    for name in ("train", "dev"):
        (tmp_path / f"{name}.txt").write_text("".join(lines))
    context = "the cat sees the dog . " * 4
    questions = [{"id": str(i), "question": "the cat", "answers": [{"text": "cat", "answer_start": 4}] if i % 2 else [],
                  "is_impossible": i % 2 == 0} for i in range(8)]  # fmt: skip
    (tmp_path / "s.json").write_text(json.dumps({"data": [{"paragraphs": [{"context": context, "qas": questions}]}]}))
    tasks = [
        write_task(tmp_path / "tags.json", kind="tokens", format="conll", metrics=["entity_f1"], train="train.txt",
                   dev="dev.txt", columns={"tokens": 0, "label": 1}),
        write_task(tmp_path / "answers.json", kind="span", format="squad", metrics=["span_f1", "exact_match"],
                   train="s.json", dev="s.json", doc_stride=8),
    ]  # fmt: skip
    output = tmp_path / "out"
    assert run.main(
        ["--model", str(folder / "ours"), "--tasks", *map(str, tasks), "--data", str(tmp_path), "--output", str(output),
         "--seeds", "1", "--untrained_seeds", "0", *QUICK]
    ) == 0  # fmt: skip
    report = read_report(output)
    assert result_of(report, "tags", "ours")["values"]["entity_f1"][0] > 0.9
    text = (output / "report.md").read_text()
    assert "Scores of one seed and, in brackets, a 95 % bootstrap interval over rows" in text
    assert "±" not in text
    assert re.search(r"answers, ours: trained for \d steps", text)
    (task,) = (item for item in report["tasks"] if item["name"] == "answers")
    assert task["majority"]["exact_match"] == 0.5  # "no answer" is right for half of the questions
    assert 0 <= result_of(report, "answers", "ours")["values"]["span_f1"][0] <= 1


def test_a_loss_that_is_not_finite_is_counted_and_shown(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = save_model(tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    name = next(name for name in weights if name.endswith("LayerNorm.weight"))
    save_file(
        weights | {name: torch.full_like(weights[name], torch.nan)}, broken / "model.safetensors", {"format": "pt"}
    )
    words = ["--model", str(broken), "--tasks", str(folder / "reviews.csv"), "--text", "text", "--label", "stars"]
    assert run.main([*words, "--output", str(tmp_path / "out"), "--seeds", "2", "--untrained_seeds", "0"]) == 0
    found = result_of(read_report(tmp_path / "out"), "reviews", "broken")
    assert found["num_collapsed"] == 2
    assert "not finite" in found["collapsed"]["1"]
    assert "2 of 2 collapsed" in (tmp_path / "out" / "report.md").read_text()
    assert "seed 1 collapsed" in capsys.readouterr().err


def test_a_model_without_a_masked_head_is_left_out_of_minimal_pairs(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModel

    encoder = save_model(tmp_path / "encoder", pre_ln=False)
    AutoModel.from_pretrained(encoder).save_pretrained(encoder)
    words = ["--tasks", "blimp", "--data", str(folder), "--output", str(tmp_path / "out"), "--untrained_seeds", "0"]
    assert run.main(["--model", str(encoder), str(folder / "ours"), *words]) == 0
    assert "encoder: not scored, because encoder has no head for masked tokens" in capsys.readouterr().err
    assert "not available" in (tmp_path / "out" / "report.md").read_text()
    with pytest.raises(UserError, match="no model can do any of the tasks"):
        run.main(["--model", str(encoder), *words])


def test_other_architectures_go_through_the_same_command(folder: Path, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    sizes: dict[str, Any] = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 2,
                             "num_attention_heads": 2, "intermediate_size": 48, "pad_token_id": 0}  # fmt: skip
    configs = {
        "roberta": transformers.RobertaConfig(**sizes, max_position_embeddings=33, type_vocab_size=1),
        "modernbert": transformers.ModernBertConfig(
            **sizes, max_position_embeddings=64, global_attn_every_n_layers=2, local_attention=8
        ),
        "albert": transformers.AlbertConfig(**sizes, max_position_embeddings=64, embedding_size=16),
    }
    for name, config in configs.items():
        transformers.AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    words = [
        "--tasks",
        str(folder / "reviews.csv"),
        "blimp",
        "--text",
        "text",
        "--label",
        "stars",
        "--data",
        str(folder),
    ]
    words += ["--seeds", "1", "--untrained_seeds", "0", "--epochs", "1", "--max_train_rows", "16"]
    assert (
        run.main(["--model", *(str(tmp_path / name) for name in configs), *words, "--output", str(tmp_path / "o")]) == 0
    )
    for name in configs:
        expected = "stock" if name == "albert" else "packed"  # our model does not compute ALBERT
        assert result_of(read_report(tmp_path / "o"), "blimp", name)["scorer"] == expected
        assert 0 <= result_of(read_report(tmp_path / "o"), "reviews", name)["values"]["accuracy"][0] <= 1


def test_all_mistakes_are_reported_at_once_with_exit_code_2(folder: Path, tmp_path: Path) -> None:
    bare = save_model(tmp_path / "bare")
    for path in bare.glob("tokenizer*"):
        path.unlink()
    command = [sys.executable, "-m", "evaluation.run", "--model", str(bare), str(tmp_path / "nowhere")]
    command += ["--tasks", "rte", "--data", str(folder), "--output", str(folder / "reviews.csv"), "--batch_size", "10"]
    command += ["--micro_batch_size", "3", "--deepspeed_config", str(folder / "reviews.csv")]
    ended = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 2
    for part in (
        "bare: has no tokenizer",
        "nowhere: is not a folder",
        "task rte: found no data below --data",
        "is a file; expected a folder",
        "--micro_batch_size 3: does not divide",
        "is not valid JSON",
    ):
        assert part in ended.stderr
    assert "Traceback" not in ended.stderr
