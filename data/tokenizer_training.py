"""Trains tokenizers: WordPiece with BERT's rules, byte-level BPE, Unigram. The result depends on the text alone."""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from common.errors import UserError
from data.special_tokens import MASK, SPECIALS, UNK
from data.tokenizer import CONTINUATION, BertTokenizer, add_bert_rules, add_special_tokens, bert_from_tokens

TokenizerType = Literal["wordpiece", "bpe", "unigram"]
TOKENIZER_TYPES: tuple[TokenizerType, ...] = get_args(TokenizerType)
DEFAULT_TYPE: TokenizerType = "wordpiece"
_BYTE_SPECIALS = tuple(name for name in SPECIALS if name != UNK)  # bytes can spell every text
# The smallest vocabulary that the trainer accepts.
MIN_VOCABULARIES = {"wordpiece": len(SPECIALS) + 2, "bpe": len(_BYTE_SPECIALS) + 256, "unigram": len(SPECIALS) + 2}
_MIN_ALPHABET = 1000  # characters, if a text has so many
_COVERAGE = 0.9999  # share of a text's characters
_LINES_AT_ONCE = 10_000
_LINES_PER_TEXT = 1000  # of those fed to the trainer, which buffers 256 texts
_SIGN = re.compile(r"[!-/:-@\[-`{-~]")  # ASCII punctuation, each a word of its own
_SCORE_DIGITS = 6
_MAX_FILES = 512  # that a sample of the text is taken from: opened in a second, however large the corpus
_SCORE_STEP = 1e-4  # by which the library separates the scores of characters that have none of their own


class TextSample:
    """Lines of the files, read again on every iteration, with at most one file in memory.

    Of files that exceed `max_bytes` together, up to 512 evenly spaced ones give an equal number of bytes from their
    beginning. The sample depends on the files and their order alone.
    """

    def __init__(self, paths: Sequence[Path], max_bytes: int) -> None:
        self.size = sum(path.stat().st_size for path in paths)
        self.is_part = self.size > max_bytes
        self._paths, self._bytes_per_file = paths, -1
        if self.is_part:
            count = min(len(paths), _MAX_FILES)
            self._paths = [paths[i * len(paths) // count] for i in range(count)]
            self._bytes_per_file = max_bytes // count
            self.size = sum(len(self._read(path)) for path in self._paths)

    def __iter__(self) -> Iterator[str]:
        for path in self._paths:
            yield from self._read(path).decode().split("\n")

    def _read(self, path: Path) -> bytes:
        """Return the whole lines within the bytes that the file gives."""
        with path.open("rb") as stream:
            content = stream.read(self._bytes_per_file)
        return content[: content.rfind(b"\n") + 1]


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, lower_case: bool | None = None, kind: TokenizerType = DEFAULT_TYPE
) -> BertTokenizer:
    """Train a vocabulary of at most `vocab_size` on `texts`; `lower_case` None: as usual for the kind.

    The texts are iterated up to twice and not kept: memory grows only with the number of different words.
    """
    if vocab_size < MIN_VOCABULARIES[kind]:
        raise UserError(f"--vocab_size {vocab_size} is too small; BERT uses 30522, a small corpus 8192")
    texts = list(texts) if isinstance(texts, Iterator) else texts
    train = {"wordpiece": _train_wordpiece, "bpe": _train_bpe, "unigram": _train_unigram}[kind]
    return train(texts, vocab_size, kind == "wordpiece" if lower_case is None else lower_case)


def _train_wordpiece(texts: Iterable[str], vocab_size: int, lower_case: bool) -> BertTokenizer:
    # The trainer numbers "##" characters in the order of a hash table, which differs from run to run, and breaks ties
    # by these numbers. Listing them beforehand, and removing words with any other character, makes the vocabulary a
    # function of the text alone.
    rules = Tokenizer(models.WordPiece())  # a second one, because the trainer locks the one that is trained
    add_bert_rules(rules, lower_case)
    beginnings, continuations = _alphabet(texts, rules, lower_case, vocab_size - len(SPECIALS))
    tokens = beginnings + [CONTINUATION + character for character in continuations]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIALS, *tokens],
        continuing_subword_prefix=CONTINUATION,
        show_progress=False,
    )
    backend = Tokenizer(models.WordPiece(unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # BERT's rules take three times as long
    normal = _of_alphabet(texts, beginnings, rules, lower_case)
    backend.train_from_iterator(separate_words(normal, rules), trainer=trainer)
    found = sorted(backend.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    return bert_from_tokens([token for token, _ in found], lower_case)


def _train_bpe(texts: Iterable[str], vocab_size: int, lower_case: bool) -> BertTokenizer:
    """Byte-level, as in RoBERTa and ModernBERT: no unknown token, and a space is part of the word after it."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = _normalizer("NFC", lower_case)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_BYTE_SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    return _with_roles(backend, _BYTE_SPECIALS)


def _train_unigram(texts: Iterable[str], vocab_size: int, lower_case: bool) -> BertTokenizer:
    """Train a tokenizer like SentencePiece's Unigram, which XLM-RoBERTa and CamemBERT use."""
    rules = Tokenizer(models.Unigram())
    for tokenizer in (rules, backend := Tokenizer(models.Unigram())):
        tokenizer.normalizer = _normalizer("NFKC", lower_case)
        splitters = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splitters)
    backend.decoder = decoders.Metaspace()
    # Every character can begin and continue a word, so at most half of the vocabulary are characters.
    characters, _ = _alphabet(texts, rules, lower_case, vocab_size - len(SPECIALS))
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIALS), unk_token=UNK, show_progress=False
    )
    backend.train_from_iterator(_of_alphabet(texts, characters, rules, lower_case), trainer=trainer)
    pieces = json.loads(backend.to_str(pretty=False))["model"]["vocab"]
    backend.model = models.Unigram(_canonical_pieces(pieces), unk_id=SPECIALS.index(UNK), byte_fallback=False)
    return _with_roles(backend, SPECIALS)


def _canonical_pieces(pieces: Sequence[Sequence[Any]]) -> list[tuple[str, float]]:
    """[piece, log probability] of the trainer with what depends on the order of its hash tables removed.

    That is the last digits of all scores, and which of the characters that have no score of their own gets which of
    the scores just above the lowest one.
    """
    found = [(piece, score) for piece, score in pieces[len(SPECIALS) :]]
    lowest = min(score for _, score in found)
    characters = sum(len(piece) == 1 for piece, _ in found)
    scores = {
        piece: lowest if len(piece) == 1 and score <= lowest + _SCORE_STEP * characters else score
        for piece, score in found
    }
    rounded = {piece: round(score, _SCORE_DIGITS) for piece, score in scores.items()}
    ordered = sorted(rounded.items(), key=lambda item: (-item[1], item[0]))
    return [*((name, 0.0) for name in SPECIALS), *ordered]


def _with_roles(backend: Tokenizer, names: Sequence[str]) -> BertTokenizer:
    """Add special tokens; the mask replaces a word and the space before it."""
    backend.add_special_tokens([AddedToken(MASK, special=True, normalized=False, lstrip=True)])
    return add_special_tokens(backend, [name for name in names if name != MASK])


def _normalizer(form: Literal["NFC", "NFKC"], lower_case: bool) -> normalizers.Normalizer:
    """Unicode's normal form; lower-casing also strips accents, as BERT's does."""
    composed = getattr(normalizers, form)()
    if not lower_case:
        return composed
    parts = [normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents(), composed]
    return normalizers.Sequence(parts)


def _alphabet(texts: Iterable[str], rules: Tokenizer, lower_case: bool, max_tokens: int) -> tuple[list[str], list[str]]:
    """Return the most frequent characters after normalisation, and those of them that can continue a word.

    They cover 99.99 % of the text, and are at least a thousand if the text has so many. That is a thousand for an
    alphabetic language, whatever other characters occur in its texts, and about five thousand for Chinese. Never more
    than `max_tokens` of both together.
    """
    counts = np.zeros(sys.maxunicode + 1, dtype=np.int64)
    remaining = iter(texts)
    while lines := list(islice(remaining, _LINES_AT_ONCE)):
        text = " ".join(_normalise(line, rules, lower_case) for line in lines)
        counts += np.bincount(np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32), minlength=len(counts))
    counts[ord(" ")] = 0
    commonest = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    enough = int(np.searchsorted(np.cumsum(counts[commonest]), _COVERAGE * counts.sum())) + 1
    beginnings: list[str] = []
    continuations: list[str] = []
    for character in map(chr, commonest[: max(enough, _MIN_ALPHABET)].tolist()):
        continues = _can_continue_word(character, rules)
        if len(beginnings) + len(continuations) + 1 + continues > max_tokens:
            break
        beginnings.append(character)
        continuations += [character] if continues else []
    return sorted(beginnings), sorted(continuations)


def _of_alphabet(texts: Iterable[str], alphabet: Sequence[str], rules: Tokenizer, lower_case: bool) -> Iterator[str]:
    """Remove the words that contain other characters, which would become [UNK] anyway."""
    known = re.escape("".join(alphabet))
    other = re.compile(rf"[^\s{known}]")
    word = re.compile(rf"\S*[^\s{known}]\S*")
    for text in texts:
        normal = _normalise(text, rules, lower_case)
        yield word.sub(" ", normal) if other.search(normal) else normal


def separate_words(texts: Iterable[str], rules: Tokenizer) -> Iterator[str]:
    """Yield the words of normalised texts with spaces between them, those of many texts together."""
    remaining = iter(texts)
    while lines := list(islice(remaining, _LINES_PER_TEXT)):
        yield _SIGN.sub(r" \g<0> ", " ".join(line for line in lines if line.isascii()))
        words = rules.pre_tokenizer.pre_tokenize_str(" ".join(line for line in lines if not line.isascii()))
        yield " ".join(word for word, _ in words)


def _normalise(text: str, rules: Tokenizer, lower_case: bool) -> str:
    """Apply the normaliser; for printable ASCII that is only lower-casing, at a hundredth of the cost."""
    if text.isascii() and text.isprintable():
        return text.lower() if lower_case else text
    return rules.normalizer.normalize_str(text)


def _can_continue_word(character: str, rules: Tokenizer) -> bool:
    """Whether it can; punctuation and Chinese characters are words by themselves."""
    return len(rules.pre_tokenizer.pre_tokenize_str(rules.normalizer.normalize_str(f"a{character}a"))) == 1
