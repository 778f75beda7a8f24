"""--export_dir: a run, and a finished run started again, end with a Hugging Face folder."""

import errno
import json
import re
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForMaskedLM, AutoTokenizer

from common.errors import UserError
from data.tokenizer import load_tokenizer
from nvidia.config import BertConfig
from nvidia.modeling import BertForPreTraining
from nvidia.modelingpreln import BertForPreTrainingPreLN
from tests.support import VOCAB, make_rows, read_metrics, write_json, write_project
from tests.unit.training.in_process import run_here
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.state import TrainingState
from training.export.hugging_face import export_checkpoint, read_weights
from training.export.model_card import CardFacts, CardRequest, model_card, read_card_facts


def check_export(folder: Path) -> None:
    """It equals the export of the last checkpoint by the command, and stock transformers loads it."""
    checkpoints = CheckpointFolder(folder / "out" / "saved_models" / "tiny")
    export_checkpoint(checkpoints.folder / checkpoints.choose(None), folder / "later", None, None)
    expected = load_file(folder / "later" / "model.safetensors")
    found = load_file(folder / "hf" / "model.safetensors")
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    AutoModelForMaskedLM.from_pretrained(folder / "hf")
    assert "| 3 |" in (folder / "hf" / "README.md").read_text()  # the last validation's figures


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_run_ends_with_an_export(stage: int, tmp_path: Path) -> None:
    words = write_project(tmp_path, zero_optimization={"stage": stage})
    run_here([*words, "--max_steps", "3", "--export_dir", str(tmp_path / "hf")])
    check_export(tmp_path)


def test_a_finished_run_exports_when_asked_later(tmp_path: Path) -> None:
    words = [*write_project(tmp_path), "--max_steps", "3"]
    run_here(words)
    run_here([*words, "--export_dir", str(tmp_path / "hf")])
    check_export(tmp_path)


def test_a_run_whose_figures_could_never_be_written_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("training.metrics.sinks.append_whole", fail)
    run_here([*write_project(tmp_path), "--max_steps", "3", "--export_dir", str(tmp_path / "hf")])
    assert not (tmp_path / "out" / "runs" / "tiny" / "metrics.jsonl").exists()
    assert "The model card is written without figures" in capsys.readouterr().err
    AutoModelForMaskedLM.from_pretrained(tmp_path / "hf")
    assert "Not known here: " in (tmp_path / "hf" / "README.md").read_text()


def test_without_sentence_labels_no_figure_of_them_appears(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = write_project(tmp_path)
    path = tmp_path / "model.json"
    path.write_text(path.read_text().replace('"hidden_size"', '"sentence_head": "none", "hidden_size"'))
    run_here([*words, "--max_steps", "3", "--export_dir", str(tmp_path / "hf")])
    assert "nsp" not in capsys.readouterr().out
    for kind in ("train", "validation"):
        for row in read_metrics(tmp_path, kind):
            assert row["loss"] == row["mlm_loss"]
            assert not [key for key in row if "nsp" in key]
    events = EventAccumulator(str(tmp_path / "out" / "runs" / "tiny")).Reload()
    assert not [tag for tag in events.Tags()["scalars"] if "nsp" in tag]
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "| 3 |" in card
    assert "next sentence" not in card


@pytest.mark.parametrize("flag", ["--preln", "--no-preln"])
def test_the_tokenizers_padding_token_counts_where_the_model_json_names_none(flag: str, tmp_path: Path) -> None:
    """A pre-LN export numbers its positions from the id of [PAD] on, which is not 0 here."""
    run_here([*write_project(tmp_path), "--max_steps", "3", flag])
    vocabulary = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(VOCAB - 5))]
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in vocabulary))
    checkpoints = CheckpointFolder(tmp_path / "out" / "saved_models" / "tiny")
    checkpoint = checkpoints.folder / checkpoints.choose(None)
    state = export_checkpoint(checkpoint, tmp_path / "hf", load_tokenizer(tmp_path / "vocab.txt"), None)
    assert state.model_config["pad_token_id"] == 0

    config = BertConfig.from_dict(state.model_config)
    ours = (BertForPreTrainingPreLN if flag == "--preln" else BertForPreTraining)(config).eval()
    ours.load_state_dict(read_weights(checkpoint))
    stock = AutoModelForMaskedLM.from_pretrained(tmp_path / "hf").eval()
    assert stock.config.pad_token_id == 1
    rows = make_rows(7, 24, 4, seed=3)
    mask, segments = (torch.from_numpy(rows[name]).long() for name in ("input_mask", "segment_ids"))
    ids = torch.where(mask.bool(), torch.from_numpy(rows["input_ids"]).long(), 1)
    with torch.no_grad():
        mine, theirs = ours.masked_lm_logits(ids, mask, segments), stock(ids, mask, segments).logits
    assert (mine - theirs)[mask.bool()].abs().max() <= 1e-5

    stock_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert stock_tokenizer.model_max_length == config.max_position_embeddings
    with torch.no_grad():  # as many tokens as positions, which is all that the model can take
        stock(**stock_tokenizer("word1 " * 100, truncation=True, return_tensors="pt"))


@pytest.mark.parametrize(
    ("head", "objective", "classes"),
    [
        ("nsp", "masked tokens and next sentence (nsp)", 'class 1 "B is random"'),
        ("sop", "masked tokens and sentence order (sop)", 'class 1 "A and B are swapped"'),
        ("none", "masked tokens alone", ""),
    ],
)
def test_the_model_card_names_the_objective(head: str, objective: str, classes: str) -> None:
    config = BertConfig(vocab_size=64, sentence_head=head)
    state = TrainingState(3, 0, 24, 300, 42, 1, 0, "fp32", "", None, None, config.to_dict(), is_preln=True)
    architectures = {"architectures": ["RobertaPreLayerNormForMaskedLM"]}
    card = model_card(state, architectures, CardFacts(), CardRequest(), has_tokenizer=True)
    assert f"Objective: {objective}." in card
    assert classes in card
    assert ("seq_relationship" in card) == (head != "none")


@pytest.mark.parametrize(
    ("prepared", "commonest", "expected"),
    [
        ("de", [], ("de",)),
        ("en", ["the", ",", ".", "\u0120of", "And", "\u2581to"], ("en",)),
        ("en", ["der", "die", "in", "a"], ()),  # the default of --language, which the text contradicts
    ],
)
def test_languages_that_the_preparation_knows(
    prepared: str, commonest: list[str], expected: tuple[str, ...], tmp_path: Path
) -> None:
    model = {"data": {"mixed_seq_datasets": {"24": {"wiki": "data"}}}}
    flags = {"max_seq_length": 24, "data_path_prefix": str(tmp_path)}
    write_json(tmp_path / "resolved.json", {"flags": flags, "model": model})
    write_json(tmp_path / "data" / "manifest.json", {"settings": {"language": prepared}})
    splits = [{"commonest_tokens": [[token, 0.01] for token in commonest]}]
    write_json(tmp_path / "data" / "report.json", {"preparation": {"documents": 2}, "splits": splits})
    facts = read_card_facts(tmp_path, None, 3)
    assert facts.languages == expected
    assert facts.data == (f"`wiki` (data): 2 documents, prepared for the language `{prepared}`",)
    config = BertConfig(vocab_size=64, sentence_head="sop")
    state = TrainingState(3, 0, 24, 300, 42, 1, 0, "fp32", "", None, None, config.to_dict(), is_preln=True)
    figures = {"step": 3, "mlm_loss": 2.0, "perplexity": 7.4, "mlm_accuracy": 0.5, "nsp_accuracy": 0.75}
    facts = facts._replace(validation=figures)
    card = model_card(state, {"architectures": ["X"]}, facts, CardRequest(), has_tokenizer=True)
    assert ("language:\n" + "".join(f'- "{code}"\n' for code in expected) in card) == bool(expected)
    assert "sentence order right" in card
    assert "next sentence right" not in card


def test_a_file_in_its_place_is_refused_before_the_run(tmp_path: Path) -> None:
    words = write_project(tmp_path)
    (tmp_path / "hf").write_text("")
    with pytest.raises(UserError, match=r"--export_dir .* is a file"):
        run_here([*words, "--export_dir", str(tmp_path / "hf")])


def test_a_file_created_there_during_the_run_is_reported_with_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = write_project(tmp_path)
    (tmp_path / "hf").write_text("")
    monkeypatch.setattr("training.preflight.check_export_folder", lambda *_: None)
    with pytest.raises(UserError, match=r"--export_dir .* is a file.* another --export_dir"):
        run_here([*words, "--max_steps", "1", "--export_dir", str(tmp_path / "hf")])


def test_another_tokenizer_of_the_same_size_is_refused(tmp_path: Path) -> None:
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(VOCAB - 5))]
    words = write_project(tmp_path)
    for name, tokens in (("right.txt", vocabulary), ("wrong.txt", [*vocabulary[:5], *reversed(vocabulary[5:])])):
        (tmp_path / name).write_text("".join(f"{word}\n" for word in tokens))
    path = tmp_path / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bert_token_file": str(tmp_path / "right.txt")}))
    run_here([*words, "--max_steps", "1"])
    checkpoints = CheckpointFolder(tmp_path / "out" / "saved_models" / "tiny")
    checkpoint = checkpoints.folder / checkpoints.choose(None)
    with pytest.raises(UserError, match="a different tokenizer"):
        export_checkpoint(checkpoint, tmp_path / "hf", load_tokenizer(tmp_path / "wrong.txt"), None)
    assert not (tmp_path / "hf").exists()
    export_checkpoint(checkpoint, tmp_path / "hf", load_tokenizer(tmp_path / "right.txt"), None)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "hf").iterdir()}
    assert len(modes) > 5
    assert len(set(modes.values())) == 1, "weights are for whom the other files are"


@pytest.mark.parametrize("flag", ["--preln", "--no-preln"])
def test_the_model_card_is_complete_and_its_example_runs(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = write_project(tmp_path)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(VOCAB - 5))]
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in vocabulary))
    path = tmp_path / "model.json"
    path.write_text(path.read_text().replace('"name": "tiny"', '"name": "tiny", "bert_token_file": "vocab.txt"'))
    counts = {"documents": 1234, "tokens": 56789}
    inputs = [{"file": f"/texts/part_{i}.txt", "read_as": "paragraphs"} for i in range(12)]
    (tmp_path / "data" / "report.json").write_text(json.dumps({"preparation": counts, "inputs": inputs}))
    words += ["--export_license", "apache-2.0", "--export_language", "en,de", flag]
    run_here([*words, "--max_steps", "3", "--export_dir", str(tmp_path / "hf")])
    card = (tmp_path / "hf" / "README.md").read_text()
    head = card.split("---\n")[1]
    assert 'license: "apache-2.0"\nlanguage:\n- "en"\n- "de"\n' in head
    assert "`wiki` (data): 1,234 documents, 56,789 tokens, from `part_0.txt`, `part_1.txt`" in card
    assert "`part_9.txt` and 2 more files" in card
    for fact in ("| learning_rate | 0.003 |", "| batch_size | 8 |", "| hardware | ", "| 3 |"):
        assert fact in card
    assert re.search(r"\| time \(h:mm:ss\) \| \d+:\d\d:\d\d \|", card)
    assert "not recorded" not in card
    assert card.count("[TO BE FILLED IN]") == 4
    example = card.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path / "hf")
    capsys.readouterr()
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out.count("%") == 5
