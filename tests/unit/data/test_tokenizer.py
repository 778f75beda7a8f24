"""The tokenizer against stock transformers, and the fast encoder against the tokenizer."""

import json
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, BertTokenizer, BertTokenizerFast

from common.errors import UserError
from data.instances.encoder import Encoder
from data.special_tokens import SPECIALS
from data.tokenizer import load_tokenizer
from data.tokenizer_training import separate_words, train_tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog. It's 3.14 o'clock!",
    "Ünïcödé: Crème brûlée, naïve café; straße ΣΊΣΥΦΟΣ İstanbul",
    "我们今天去公园。天気がいいですね 한국어 문장입니다",
    "Привет, мир! Ёлка и йод — «цитата»",
    "مرحبا بالعالم، كيف الحال؟ שלום עולם",
    "हिन्दी में एक वाक्य। ไทยไม่มีช่องว่าง",
    "tabs\tand\nnewlines\r and\u00a0no-break\u2003spaces \u200bzero\u00adsoft",
    "control\x00chars\x07here\x7f and \ufffd replaced \ue000 private",
    "punct: $100 + 5% = {a: b} <c> [d] ~e^f_g|h \\ `i` “quotes” ‘x’ … – —",
    "emoji 😀👍🏽 math ∑√∞ ½ ² ① ﬁ ﬂ Ⅷ",
    "never split [MASK] and [SEP] but [mask] and [ MASK ] are",
    "a" * 150 + " " + "b" * 99 + " supercalifragilisticexpialidocious",
    "",
    "   ",
]


@pytest.fixture(name="vocabularies", scope="module")
def _vocabularies(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    folders = {}
    for lower_case in (True, False):
        folders[lower_case] = tmp_path_factory.mktemp(f"lower_{lower_case}")
        train_tokenizer(TEXTS * 3, 400, lower_case).save(folders[lower_case])
    return folders


@pytest.mark.parametrize("lower_case", [True, False])
def test_ids_are_those_of_stock_bert_tokenizer(vocabularies: dict[bool, Path], lower_case: bool) -> None:
    vocabulary = vocabularies[lower_case] / "vocab.txt"
    tokens = vocabulary.read_text().split("\n")[:-1]
    stock = BertTokenizer(vocab={token: i for i, token in enumerate(tokens)}, do_lower_case=lower_case)
    ours = load_tokenizer(vocabulary, lower_case=lower_case)
    for text in TEXTS:
        assert ours.backend.encode(text).ids == stock(text)["input_ids"], text


def plain_bert(text: str, vocabulary: dict[str, int], lower_case: bool) -> list[int]:
    """BERT's rules in plain Python, as in the code of its paper, to compare the library with."""
    ids: list[int] = []
    for part in re.split(f"({'|'.join(map(re.escape, SPECIALS))})", text):
        if part in SPECIALS:
            ids.append(vocabulary[part])
            continue
        for word in plain_words(part, lower_case):
            ids += plain_word_pieces(word, vocabulary)
    return ids


def plain_words(text: str, lower_case: bool) -> list[str]:
    cleaned = ""
    for character in text:
        code, category = ord(character), unicodedata.category(character)
        if character in "\t\n\r" or category == "Zs":
            cleaned += " "
        elif code in (0, 0xFFFD) or category.startswith("C"):
            continue
        elif any(low <= code <= high for low, high in CHINESE):
            cleaned += f" {character} "
        else:
            cleaned += character
    words: list[str] = []
    for word in cleaned.split():
        if lower_case:
            decomposed = unicodedata.normalize("NFD", word.lower())
            word = "".join(character for character in decomposed if unicodedata.category(character) != "Mn")
        piece = ""
        for character in word:
            is_ascii_symbol = 33 <= ord(character) <= 126 and not character.isalnum()
            if is_ascii_symbol or unicodedata.category(character).startswith("P"):
                words += [piece, character]
                piece = ""
            else:
                piece += character
        words.append(piece)
    return [word for word in words if word]


def plain_word_pieces(word: str, vocabulary: dict[str, int]) -> list[int]:
    pieces: list[int] = []
    start = 0
    while start < len(word) <= 100:
        ends = (end for end in range(len(word), start, -1) if ("##" if start else "") + word[start:end] in vocabulary)
        end = next(ends, None)
        if end is None:
            return [vocabulary["[UNK]"]]
        pieces.append(vocabulary[("##" if start else "") + word[start:end]])
        start = end
    return pieces if len(word) <= 100 else [vocabulary["[UNK]"]]


CHINESE = [
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F), (0x2B740, 0x2B81F), (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
]  # fmt: skip


@pytest.mark.parametrize("lower_case", [True, False])
def test_ids_are_those_of_bert_s_rules_in_plain_python(vocabularies: dict[bool, Path], lower_case: bool) -> None:
    tokenizer = load_tokenizer(vocabularies[lower_case])
    # Greek capitals are left out: Python's lower() knows the sigma at a word's end, which BERT's library does not.
    texts = [text.replace("ΣΊΣΥΦΟΣ", "Σίσυφος") for text in TEXTS]
    encoded = Encoder(tokenizer).encode(texts)
    starts = [0, *encoded.ends.tolist()]
    for number, text in enumerate(texts):
        expected = plain_bert(text, tokenizer.vocabulary, lower_case)
        assert tokenizer.backend.encode(text, add_special_tokens=False).ids == expected, text
        assert encoded.ids[starts[number] : starts[number + 1]].tolist() == expected, text
    assert sum(token == tokenizer.unk_id for token in encoded.ids.tolist()) < len(encoded.ids) / 2


@pytest.mark.parametrize("lower_case", [True, False])
def test_stock_transformers_loads_saved_tokenizers(vocabularies: dict[bool, Path], lower_case: bool) -> None:
    ours = load_tokenizer(vocabularies[lower_case])
    assert ours.lower_case == lower_case
    for kind in (AutoTokenizer, BertTokenizerFast):
        stock = kind.from_pretrained(vocabularies[lower_case])
        theirs = [getattr(stock, f"{name}_token_id") for name in ("pad", "unk", "cls", "sep", "mask")]
        assert theirs == [ours.pad_id, ours.unk_id, ours.cls_id, ours.sep_id, ours.mask_id]
        for text in TEXTS:
            assert stock(text)["input_ids"] == ours.backend.encode(text).ids
        pair = stock("a b", "c d")
        assert pair["token_type_ids"] == ours.backend.encode("a b", "c d").type_ids


@pytest.mark.parametrize("lower_case", [True, False])
def test_the_fast_encoder_gives_the_tokenizer_s_ids(vocabularies: dict[bool, Path], lower_case: bool) -> None:
    check_encoder(vocabularies[lower_case], TEXTS)


alphabet = st.one_of(
    st.sampled_from("abcXYZ 019.,!-_'[]\t"),
    st.sampled_from("éßÅİΣς我ア한й؟ा\u0301\u200b\u00a0\u2424\ufffd😀–“"),
    st.characters(exclude_categories=["Cs"]),
)


@settings(max_examples=150)
@given(st.lists(st.text(alphabet, max_size=30), max_size=6), st.booleans())
def test_the_fast_encoder_on_any_text(vocabularies: dict[bool, Path], texts: list[str], lower_case: bool) -> None:
    check_encoder(vocabularies[lower_case], texts)


def check_encoder(folder: Path, texts: list[str]) -> None:
    tokenizer = load_tokenizer(folder)
    encoder = Encoder(tokenizer)
    for _ in range(2):  # the second time from memory
        encoded = encoder.encode(texts)
        starts = [0, *encoded.ends.tolist()]
        assert len(encoded.ends) == len(texts)
        for number, text in enumerate(texts):
            expected = tokenizer.backend.encode(text, add_special_tokens=False)
            part = slice(starts[number], starts[number + 1])
            assert encoded.ids[part].tolist() == expected.ids, text
            words = [-1 if word is None else word for word in expected.word_ids]
            begins = [i == 0 or words[i] != words[i - 1] or words[i] == -1 for i in range(len(words))]
            assert encoded.word_starts[part].tolist() == begins, text


def test_added_tokens_of_several_words_are_kept_whole(vocabularies: dict[bool, Path], tmp_path: Path) -> None:
    backend = Tokenizer.from_file(str(vocabularies[True] / "tokenizer.json"))
    backend.add_tokens([AddedToken("new york", normalized=True), AddedToken("Fox Dog", normalized=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    check_encoder(tmp_path, ["in New  York today", "in NÉW York", "the Fox Dog", "the fox dog", "plain words"])


@pytest.mark.parametrize("lower_case", [False, True])
def test_training_counts_the_words_of_berts_rules(lower_case: bool, vocabularies: dict[bool, Path]) -> None:
    rules = load_tokenizer(vocabularies[lower_case]).backend
    normal = [rules.normalizer.normalize_str(text) for text in TEXTS]
    words = [word for text in normal for word, _ in rules.pre_tokenizer.pre_tokenize_str(text)]
    assert sorted(" ".join(separate_words(normal, rules)).split()) == sorted(words)


def test_training_twice_gives_the_same_vocabulary() -> None:
    assert train_tokenizer(TEXTS * 3, 300).digest == train_tokenizer(TEXTS * 3, 300).digest


MANY_CHARACTERS = """
import random, sys
from data.tokenizer_training import train_tokenizer
draw = random.Random(0)
letters = [chr(code) for start, count in ((0x61, 26), (0x400, 400), (0x1200, 300), (0x4E00, 1500)) for code in
           range(start, start + count)]
texts = [" ".join("".join(draw.choices(letters, k=draw.randint(1, 6))) for _ in range(12)) for _ in range(1500)]
tokenizer = train_tokenizer(texts, int(sys.argv[1]))
print(tokenizer.digest, tokenizer.vocab_size, len(set("".join(texts))))
"""


@pytest.mark.parametrize("size", [4500, 500])
def test_training_on_many_characters_gives_one_vocabulary_of_the_requested_size(size: int) -> None:
    """In two processes with different hash seeds; the second size is far smaller than the alphabet."""
    found = set()
    for hashes in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hashes}
        command = [sys.executable, "-c", MANY_CHARACTERS, str(size)]
        root = Path(__file__).parents[3]
        found.add(subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(found) == 1
    _, tokens, characters = found.pop().split()
    assert int(tokens) == size
    assert int(characters) > 2000


def test_words_with_characters_beyond_the_alphabet_are_not_trained_on() -> None:
    tokenizer = train_tokenizer(["walking talking", "wølking tбlking"] * 9 + ["walked talked"] * 99, 26)
    assert tokenizer.vocab_size == 26
    assert not any(letter in token for token in tokenizer.vocabulary for letter in "øб")
    assert "[UNK]" not in tokenizer.backend.encode("walked talking").tokens


def test_a_tokenizer_of_another_kind(tmp_path: Path) -> None:
    """Byte-level BPE with RoBERTa's token names: words come from its own splitting, not from "##"."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    backend.train_from_iterator(
        TEXTS * 3, trainers.BpeTrainer(vocab_size=350, special_tokens=names, show_progress=False)
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.cls_id, tokenizer.pad_id, tokenizer.mask_id, tokenizer.is_bert) == (0, 1, 4, False)
    encoded = Encoder(tokenizer).encode(["The quick brown fox", "jumps"])
    assert encoded.word_starts[0]
    assert 4 <= encoded.word_starts[: encoded.ends[0]].sum() < encoded.ends[0]
    tokenizer.save(tmp_path / "saved")
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "saved")("The fox")["input_ids"]
        == tokenizer.backend.encode("The fox").ids
    )


KINDS = {
    "no splitting": (None, models.BPE, trainers.BpeTrainer),
    "Metaspace as one word": (pre_tokenizers.Metaspace(split=False), models.Unigram, trainers.UnigramTrainer),
    "bytes as one word": (
        pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False), models.BPE, trainers.BpeTrainer
    ),
    "words": (pre_tokenizers.Whitespace(), models.BPE, trainers.BpeTrainer),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_words_begin_at_spaces_whatever_the_tokenizer_splits(tmp_path: Path, kind: str) -> None:
    splitter, model, trainer = KINDS[kind]
    backend = Tokenizer(model())
    if splitter is not None:
        backend.pre_tokenizer = splitter
    texts = TEXTS[:3] * 9 if model is models.Unigram else list(" abcdefghijklmnopqrstuvwxyzé") * 5
    options = {"unk_token": "<unk>"} if model is models.Unigram else {}
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    backend.train_from_iterator(texts, trainer(vocab_size=300, special_tokens=names, show_progress=False, **options))
    backend.save(str(tmp_path / "tokenizer.json"))
    encoder = Encoder(load_tokenizer(tmp_path))
    text = "the quick brown café"
    encoded = encoder.encode([text])
    tokens = [encoder.tokenizer.backend.id_to_token(token) for token in encoded.ids.tolist()]
    words = np.split(np.array(tokens, dtype=object), np.flatnonzero(encoded.word_starts)[1:])
    assert len(words) == 4, words
    assert "".join(words[0]).strip(" ▁Ġ") == "the"
    assert "".join(words[2]).strip(" ▁Ġ") == "brown"
    assert encoded.word_starts[0]


def test_the_encoder_forgets_words_to_bound_its_memory(
    vocabularies: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.instances.encoder._MAX_REMEMBERED", 100)
    tokenizer = load_tokenizer(vocabularies[True])
    encoder = Encoder(tokenizer)
    for first in range(0, 1000, 50):
        texts = [f"word{number} and the fox{number % 7}" for number in range(first, first + 50)]
        expected = [tokenizer.backend.encode(text, add_special_tokens=False).ids for text in texts]
        assert encoder.encode(texts).ids.tolist() == [token for ids in expected for token in ids]
        assert len(encoder._words) <= 100 + 60


def test_casing_comes_from_the_files_unless_given(vocabularies: dict[bool, Path], tmp_path: Path) -> None:
    assert load_tokenizer(vocabularies[True] / "vocab.txt").lower_case
    assert not load_tokenizer(vocabularies[False] / "vocab.txt").lower_case
    assert not load_tokenizer(vocabularies[True], lower_case=False).lower_case
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIALS, "a", "b"]) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    assert not load_tokenizer(tmp_path).lower_case


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.txt", "a\nb\n", "lacks"),
        ("vocab.txt", "\n".join([*SPECIALS, "a", "a"]), "1 repeated token"),
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer.json", "no json", "not valid JSON"),
        ("other.txt.d/x", "", "neither"),
    ],
)
def test_files_that_are_not_a_tokenizer_are_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(path.parent if name.endswith("x") else path)
    with pytest.raises(UserError, match="no such"):
        load_tokenizer(tmp_path / "absent")


def test_special_ids_are_known(vocabularies: dict[bool, Path]) -> None:
    tokenizer = load_tokenizer(vocabularies[True])
    assert tokenizer.special_ids == (0, 1, 2, 3, 4)
    names = np.array(sorted(tokenizer.vocabulary, key=lambda token: tokenizer.vocabulary[token]))
    assert all(name.startswith("##") for name in names[list(tokenizer.continuation_ids)])
