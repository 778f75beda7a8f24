"""Each sentence gets its own guesses."""

import torch

from nvidia.modelingpreln import BertForPreTrainingPreLN
from tests.unit.nvidia.helpers import spread_weights, tiny_config
from training.guesses import SENTENCES, Guesses


class Words:
    """The part of a tokenizer that guesses need: each word is a token, numbered in order of appearance."""

    cls_id, sep_id, mask_id = 2, 3, 4

    def __init__(self) -> None:
        self.backend = self
        self.words: list[str] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

    def encode(self, text: str, add_special_tokens: bool) -> "Words":
        self.words += [word for word in text.split() if word not in self.words]
        self.ids = [self.words.index(word) for word in text.split()]
        return self

    def id_to_token(self, token: int) -> str | None:
        return self.words[token] if token < len(self.words) else None


def test_a_sentence_that_is_too_long_is_left_out_with_its_guesses() -> None:
    model = BertForPreTrainingPreLN(tiny_config())
    spread_weights(model)
    tables = []
    for longest in (19, 9):
        table = Guesses(Words(), longest).table(model, torch.device("cpu"))  # type: ignore[arg-type]
        assert table is not None
        tables.append(table.splitlines()[2:])
    assert len(tables[0]) == len(SENTENCES)
    short = [sentence for sentence in SENTENCES if len(sentence.split()) + 2 <= 9]
    assert 0 < len(short) < len(SENTENCES)
    assert SENTENCES[1] not in short  # one from the middle, after which all would move up
    assert tables[1] == [line for line in tables[0] if any(sentence in line for sentence in short)]
    assert len(tables[1]) == len(short)
