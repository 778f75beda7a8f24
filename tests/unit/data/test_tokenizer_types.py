"""Byte-level BPE, Unigram and WordPiece: trained, saved, loaded by stock transformers, prepared, masked, described."""

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from common.errors import UserError
from data.instances.encoder import Encoder
from data.masking import MaskingPolicy, mask_rows
from data.prepare import main as prepare
from data.shards.dataset import open_dataset
from data.shards.report import describe
from data.tokenizer import BertTokenizer, load_tokenizer
from data.tokenizer_training import TOKENIZER_TYPES, TokenizerType, train_tokenizer
from tests.unit.data.test_tokenizer import TEXTS

SENTENCES = [
    "The quick brown foxes jump over the lazy dogs of Zürich.",
    "It doesn't matter, does it?",
    "Quickly brownish foxes jumped.",
]


@pytest.fixture(name="trained", scope="module")
def _trained() -> dict[str, BertTokenizer]:
    return {kind: train_tokenizer((TEXTS + SENTENCES) * 3, 450, kind=kind) for kind in TOKENIZER_TYPES}


@pytest.mark.parametrize("kind", TOKENIZER_TYPES)
def test_training_depends_on_the_text_alone(trained: dict[str, BertTokenizer], kind: TokenizerType) -> None:
    """The library's hash tables are in another order each time, in one process too."""
    again = train_tokenizer((TEXTS + SENTENCES) * 3, 450, kind=kind)
    assert again.digest == trained[kind].digest
    assert again.vocab_size == 450 or kind == "unigram"  # which finds fewer pieces in so little text
    assert again.lower_case == (kind == "wordpiece")
    assert train_tokenizer(SENTENCES, 300, lower_case=True, kind=kind).lower_case


@pytest.mark.parametrize("kind", TOKENIZER_TYPES)
@pytest.mark.parametrize("has_segments", [True, False])
def test_stock_transformers_gives_the_same_ids(
    trained: dict[str, BertTokenizer], tmp_path: Path, kind: str, has_segments: bool
) -> None:
    ours = trained[kind]
    ours.save(tmp_path, 77, has_segments)
    model_type = "roberta-prelayernorm" if has_segments else "modernbert"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    stock = AutoTokenizer.from_pretrained(tmp_path)
    for name, token in ours.special_tokens.items():
        assert getattr(stock, f"{name[1:-1].lower()}_token") == token
    assert (stock.unk_token is None) == (kind == "bpe")
    for text in [*TEXTS, *SENTENCES, "the [MASK] of [MASK]."]:
        assert stock(text)["input_ids"] == ours.backend.encode(text).ids, text
    assert ("token_type_ids" in stock("a b", "c d")) == has_segments
    assert stock.model_max_length == 77
    assert (tmp_path / "vocab.txt").exists() == (kind == "wordpiece")
    assert load_tokenizer(tmp_path).special_tokens == ours.special_tokens


def test_bytes_spell_every_text(trained: dict[str, BertTokenizer]) -> None:
    tokenizer = trained["bpe"]
    assert tokenizer.unk_id is None
    for text in [*TEXTS, "\N{PILE OF POO} ꙮ"]:
        ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
        normal = tokenizer.backend.normalizer.normalize_str(text)
        assert text in ("", TEXTS[10]) or tokenizer.backend.decode(ids, skip_special_tokens=False) == normal
    assert tokenizer.show(tokenizer.vocabulary["Ġbrown"]) == "Ġbrown"
    assert tokenizer.show(tokenizer.mask_id) == "[MASK]"


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_words_are_the_tokenizer_s_own(trained: dict[str, BertTokenizer], kind: str) -> None:
    """Spaces separate words; byte-level tokenizers also split off punctuation and contractions."""
    encoder = Encoder(trained[kind])
    encoded = encoder.encode_documents([SENTENCES[:2], SENTENCES[2:]])
    words = [encoder.tokenizer.backend.decode(part.tolist()) for part in np.split(
        encoded.ids, np.flatnonzero(encoded.word_starts)[1:])]  # fmt: skip
    whole = " ".join(SENTENCES).split()
    expected = whole if kind == "unigram" else " ".join(SENTENCES).replace(".", " .").replace("'t", " 't").replace(
        ",", " ,").replace("?", " ?").split()  # fmt: skip
    assert [word.strip() for word in words] == expected
    if kind == "bpe":  # a space before the second sentence of a document, none before the first of the next
        firsts = [0, *encoded.ends[:2].tolist()]
        assert [str(encoder.tokenizer.show(int(encoded.ids[i])))[0] for i in firsts] == ["T", "Ġ", "Q"]


@pytest.mark.parametrize("kind", TOKENIZER_TYPES)
def test_preparation_masking_and_description(trained: dict[str, BertTokenizer], tmp_path: Path, kind: str) -> None:
    """With [PAD] at the end of the vocabulary, where only its role says what it is."""
    backend = Tokenizer.from_str(trained[kind].backend.to_str())
    backend.add_special_tokens([AddedToken("<nothing>", special=True, normalized=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": {"content": "<nothing>"}}))
    draw, words = random.Random(0), " ".join(SENTENCES).split()
    texts = "\n\n".join(f"{' '.join(draw.sample(words, 9))}\n{SENTENCES[i % 3]}" for i in range(90))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(texts)
    options = ["--max_seq_length", "48", "--masking_unit", "word", "--objective", "mlm", "--dupe_factor", "1"]
    paths = ["--input", str(tmp_path / "text"), "--output_dir", str(tmp_path / "out"), "--workers", "1"]
    assert prepare([*paths, "--vocab_file", str(tmp_path), *options]) == 0
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer")
    assert tokenizer.pad_id == tokenizer.vocab_size - 1
    data = open_dataset(
        [tmp_path / "out" / "48"], split="training", max_seq_length=48, max_predictions_per_seq=8, verify=True
    )
    rows = data.read_range(0, data.num_rows)
    assert (rows.input_ids[rows.input_mask == 0] == tokenizer.pad_id).all()
    assert (rows.input_ids[:, 0] == tokenizer.cls_id).all()
    found = describe(data, "training", tokenizer)
    assert found.unknown_share is not None
    assert found.unknown_share < 0.01
    assert not any("unknown" in warning for warning in found.warnings)
    shown = re.sub("⟨.*?←(.*?)⟩", r"\1", " ".join(found.instances)).replace("Ġ", " ").replace("▁", " ").lower()
    assert {"foxes", "brownish"} & set(shown.split()), "parts of words are joined"
    data.close()
    check_whole_words(tokenizer, rows)
    # Shards of other tools have no word starts: the tokens themselves show where words begin.
    originals = rows.with_originals().replace(word_starts=None)
    policy = MaskingPolicy(
        tokenizer.mask_id, tokenizer.special_ids, tokenizer.vocab_size, 8, 0.3, unit="word",
        continuation_ids=tokenizer.continuation_ids,
    )  # fmt: skip
    check_whole_words(tokenizer, mask_rows(originals, policy, seed=1, epoch=0, row_numbers=np.arange(len(originals))))


def check_whole_words(tokenizer: BertTokenizer, rows: Any) -> None:
    """A token that continues a word is masked exactly if the token before it is."""
    originals = rows.with_originals().input_ids
    chosen = np.zeros(originals.shape, dtype=bool)
    row, column = np.nonzero(rows.masked_lm_positions)
    chosen[row, rows.masked_lm_positions[row, column]] = True
    letters = np.array([bool(tokenizer.show(i)) and str(tokenizer.show(i)).removeprefix("##").isalpha() for i in range(
        tokenizer.vocab_size)])  # fmt: skip
    continues = np.isin(originals, tokenizer.continuation_ids) & letters[originals]
    joined = continues[:, 1:] & letters[originals[:, :-1]] & ~np.isin(originals[:, :-1], tokenizer.special_ids)
    assert chosen.sum() > 50
    assert joined.sum() > 50
    assert (chosen[:, 1:] == chosen[:, :-1])[joined].all()


def byte_tokenizer(*names: str) -> Tokenizer:
    alphabet = {token: i for i, token in enumerate([*names, *pre_tokenizers.ByteLevel.alphabet()])}
    backend = Tokenizer(models.BPE(alphabet, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([AddedToken(name, special=True) for name in names])
    return backend


def test_roles_come_from_the_files_then_from_the_parts_then_from_the_names(tmp_path: Path) -> None:
    backend = byte_tokenizer("<s>", "<pad>", "</s>", "<begin>", "<end>", "<a mask>", "<hidden>")
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.cls_id, tokenizer.pad_id, tokenizer.sep_id, tokenizer.mask_id) == (0, 1, 2, 5)
    assert tokenizer.unk_id is None
    for processor in (
        processors.RobertaProcessing(("<end>", 4), ("<begin>", 3)),
        processors.Sequence([processors.ByteLevel(), processors.TemplateProcessing(
            "<begin> $A <end>", "<begin> $A <end> $B <end>", [("<begin>", 3), ("<end>", 4)])]),
    ):  # fmt: skip
        backend.post_processor = processor
        backend.save(str(tmp_path / "tokenizer.json"))
        tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
        assert (tokenizer.cls_id, tokenizer.sep_id) == (3, 4)
    names = {"cls_token": {"content": "<s>"}, "sep_token": "</s>", "mask_token": "<hidden>", "pad_token": None}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.cls_id, tokenizer.pad_id, tokenizer.sep_id, tokenizer.mask_id) == (0, 1, 2, 6)


def test_a_tokenizer_without_a_mask_token_is_refused(tmp_path: Path) -> None:
    byte_tokenizer("<s>", "<pad>", "</s>").save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"tokenizer\.json: the tokenizer has no mask token.*add_special_tokens"):
        load_tokenizer(tmp_path)
