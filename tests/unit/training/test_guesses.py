"""Sentences with one mask: from the data of the run or from a file, with answers, each with its own guesses."""

from pathlib import Path

import numpy as np
import pytest
import torch

from common.errors import UserError
from data.shards.dataset import open_dataset
from data.tokenizer import BertTokenizer, load_tokenizer
from nvidia.modelingpreln import BertForPreTrainingPreLN
from tests.support import write_project
from tests.unit.nvidia.helpers import spread_weights, tiny_config
from tests.unit.training.metrics.test_sinks import write_vocab
from training.guesses import encode, encode_sentences, guess_table, read_sentences, sentences_of_data

LINES = "the cat sat on the [MASK] .\tword1\n\nparis | is [MASK] .\nthe cat sat on the cat on the cat [MASK] .\tcat\n"


@pytest.fixture
def tokenizer(tmp_path: Path) -> BertTokenizer:
    write_vocab(tmp_path)
    return load_tokenizer(tmp_path / "vocab.txt")


def test_sentences_of_a_file_with_answers(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    (tmp_path / "sentences.txt").write_text(LINES)
    read = read_sentences(tmp_path / "sentences.txt")
    assert read[:2] == [("the cat sat on the [MASK] .", "word1"), ("paris | is [MASK] .", "")]
    model = BertForPreTrainingPreLN(tiny_config())
    spread_weights(model)
    tables = []
    for longest in (15, 9):  # one that is too long is left out, and the others keep their guesses
        sentences = encode_sentences(tokenizer, read, longest)
        table = guess_table(model, tokenizer, sentences, torch.device("cpu"))
        tables.append(table.splitlines()[2:])
    assert [len(table) for table in tables] == [3, 2]
    assert tables[1] == tables[0][:2]
    assert tables[0][0].startswith("| the cat sat on the [MASK] . | word1 | ")
    assert tables[0][1].startswith("| paris \\| is [MASK] . |  | ")


def test_sentences_have_one_mask_between_the_specials(tokenizer: BertTokenizer) -> None:
    row = encode(tokenizer, "the cat sat on the [MASK] .")
    assert (row[0], row[-1], row[6]) == (tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id)
    assert row.count(tokenizer.mask_id) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no mask\n", r"line 1: found \[MASK\] 0 times"),
        (b"a [MASK]\n[MASK] and [MASK]\n", r"line 2: found \[MASK\] 2 times"),
        (b"\n", "no sentences"),
        (b"\xff\xfe[MASK]", "is not UTF-8"),
    ],
)
def test_mistakes_in_a_file(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "sentences.txt").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_sentences(tmp_path / "sentences.txt")


def test_sentences_of_the_data_are_its_own_text_with_the_right_answer(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    write_project(tmp_path)
    dataset = open_dataset([tmp_path / "data"], split="validation", max_seq_length=24, max_predictions_per_seq=4)
    sentences = sentences_of_data(tokenizer, dataset, 24)
    assert len(sentences) > 3
    assert sentences == sentences_of_data(tokenizer, dataset, 24)
    rows = dataset.read_range(0, dataset.num_rows)
    originals = rows.input_ids.astype(np.int64)
    row_index, column = np.nonzero(rows.masked_lm_positions)
    originals[row_index, rows.masked_lm_positions[row_index, column]] = rows.masked_lm_ids[row_index, column]
    texts = [" ".join(map(str, row.tolist())) for row in originals]
    for sentence in sentences:
        assert sentence.text.count("[MASK]") == 1
        assert not sentence.text.startswith("##")
        answer = tokenizer.backend.token_to_id(sentence.answer)
        assert answer is not None
        filled = [answer if token == tokenizer.mask_id else token for token in sentence.ids[1:-1]]
        assert any(" ".join(map(str, filled)) in text for text in texts)
