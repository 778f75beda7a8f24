"""What lands in TensorBoard, read back."""

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from data.tokenizer import load_tokenizer
from tests.support import VOCAB, write_project
from tests.unit.training.in_process import run_here
from training.samples import SENTENCES, encode

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "paris", "is", "capital", "of", "."]


def write_vocab(folder: Path) -> None:
    words = [*WORDS, *(f"word{index}" for index in range(VOCAB - len(WORDS)))]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    words = write_project(folder)
    write_vocab(folder)
    path = folder / "model.json"
    path.write_text(path.read_text().replace('"name": "tiny"', '"name": "tiny", "bert_token_file": "vocab.txt"'))
    run_here([*words, "--max_steps", "4", "--validate_every_steps", "2", "--log_histograms"])
    return folder


@pytest.fixture(scope="module")
def events(finished: Path) -> Any:
    accumulator = EventAccumulator(str(finished / "out" / "runs" / "tiny"), size_guidance={"tensors": 0})
    return accumulator.Reload()


def test_scalars_on_steps_and_on_samples(events: Any) -> None:
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]
    by_samples = EventAccumulator(f"{events.path}/by_samples").Reload()
    assert [event.step for event in by_samples.Scalars("train_by_samples/loss")] == [8, 16, 24, 32]
    assert [event.step for event in events.Scalars("validation/perplexity")] == [2, 4]


def test_guesses_configs_and_final_figures(events: Any) -> None:
    tags = events.Tags()["tensors"]
    guesses = events.Tensors("guesses/text_summary")
    assert [event.step for event in guesses] == [2, 4]
    assert "capital of" in guesses[0].tensor_proto.string_val[0].decode()
    assert "model.json/text_summary" in tags
    assert "final/validation/mlm_loss" in events.Tags()["scalars"]


def test_histograms_of_all_weights(events: Any) -> None:
    assert "bert/pooler/dense_act/weight" in events.Tags()["histograms"]


def test_sentences_have_one_mask_between_the_specials(tmp_path: Path) -> None:
    write_vocab(tmp_path)
    tokenizer = load_tokenizer(tmp_path / "vocab.txt")
    for sentence in SENTENCES:
        row = encode(tokenizer, sentence)
        assert (row[0], row[-1]) == (tokenizer.cls_id, tokenizer.sep_id)
        assert row.count(tokenizer.mask_id) == 1
