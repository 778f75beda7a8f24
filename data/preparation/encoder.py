"""Sentences to token ids, many at once, and where each word begins.

BERT's tokenizer treats every word by itself, so a word needs to be looked up only once: after that a corpus costs one
regular expression and one dictionary access a word, a fraction of encoding it sentence by sentence. What a word is, and
which ids it has, is still decided by the tokenizer itself; the tests hold both ways equal.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding

from data.tokenizer import BertTokenizer

_LINE_END = "\u2424"  # stands for "\n", which the normaliser would turn into a space
_ASCII_WORDS = re.compile(r"[A-Za-z0-9]+|[!-/:-@\[-`{-~]|\n")
_ASCII_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_MAX_REMEMBERED = 150_000  # words; 280 bytes each, about 42 MB. Beyond it the table starts anew
_WORD_MARKS = ("▁", "Ġ")  # how SentencePiece and byte-level vocabularies write a blank


class Encoded(NamedTuple):
    """Token ids of several sentences, end to end."""

    ids: np.ndarray  # [T] int32
    word_starts: np.ndarray  # [T] bool
    ends: np.ndarray  # [sentences] int64; where each sentence's ids end


class _Numbers(dict[str, int]):
    """word → number; a word not met before gets the next one. 0 is left for the end of a line."""

    def __init__(self) -> None:
        self.count = 1
        self.new: list[str] = []

    def __missing__(self, word: str) -> int:
        number = self[word] = self.count
        self.count += 1
        self.new.append(word)
        return number

    def take_new(self) -> list[str]:
        """The words numbered since the last call, in order."""
        new, self.new = self.new, []
        return new


class Encoder:
    """Encodes with one tokenizer, remembering words."""

    def __init__(self, tokenizer: BertTokenizer) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.unk_id = tokenizer.unk_id
        self._is_bert = tokenizer.is_bert
        self._backend = tokenizer.backend
        self._lower_case = tokenizer.lower_case
        tokens = list(self._backend.get_added_tokens_decoder().values())
        # Words are looked up one by one unless a token may stand for several of them as they are after normalising.
        self._is_word_wise = self._is_bert and not any(token.normalized for token in tokens)
        added = [token.content for token in tokens]
        self._added = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True)))) if added else None
        self._punctuation: dict[str, str] = {}  # non-ASCII characters → "word", "space" or "punctuation"
        self._words = _ASCII_WORDS
        self._number_of = _Numbers()
        self._table = np.empty(0, dtype=np.int32)  # ids of all known words, end to end
        self._sizes = np.zeros(1, dtype=np.int64)  # of each word; word 0 is the end of a line and has no ids
        self._firsts = np.zeros(1, dtype=np.int64)  # where each word's ids begin in the table

    def encode(self, sentences: Sequence[str]) -> Encoded:
        """Ids without [CLS] and [SEP]. A sentence may come out empty."""
        if not self._is_word_wise or not sentences:
            return _assemble([self._encode_plainly(sentence) for sentence in sentences])
        if len(self._number_of) > _MAX_REMEMBERED:
            self._forget()
        if self._is_plain("\n".join(sentences), len(sentences)):
            return self._encode_ascii(sentences)
        groups: tuple[list[int], list[int], list[int]] = ([], [], [])
        for i, sentence in enumerate(sentences):
            groups[self._way_of(sentence)].append(i)
        ways = (self._encode_ascii, self._encode_unicode)
        parts: list[tuple[np.ndarray, np.ndarray]] = [(_NO_IDS, _NO_STARTS)] * len(sentences)
        for way, group in zip(ways, groups[:2], strict=True):
            if group:
                for i, part in zip(group, _split(way([sentences[i] for i in group])), strict=True):
                    parts[i] = part
        for i in groups[2]:
            parts[i] = self._encode_plainly(sentences[i])
        return _assemble(parts)

    def _is_plain(self, text: str, count: int) -> bool:
        """Whether every sentence is ASCII, on one line, and names no special token: the common case, told at once."""
        return text.isascii() and text.count("\n") == count - 1 and not (self._added and self._added.search(text))

    def _way_of(self, sentence: str) -> int:
        if self._added and self._added.search(sentence):
            return 2  # the text names a special token: never split, so the tokenizer must see it whole
        if sentence.isascii():
            return 0
        return 2 if _LINE_END in sentence else 1

    def _encode_ascii(self, sentences: Sequence[str]) -> Encoded:
        text = "\n".join(sentences) + "\n"
        if text.count("\n") != len(sentences):
            text = "\n".join(sentence.replace("\n", " ") for sentence in sentences) + "\n"
        if _ASCII_CONTROLS.search(text):
            text = _ASCII_CONTROLS.sub("", text)
        if self._lower_case:
            text = text.lower()
        return self._look_up(_ASCII_WORDS.findall(text), "\n")

    def _encode_unicode(self, sentences: Sequence[str]) -> Encoded:
        text = self._backend.normalizer.normalize_str(_LINE_END.join(sentences) + _LINE_END)
        self._learn_characters(text)
        return self._look_up(self._words.findall(text), _LINE_END)

    def _learn_characters(self, text: str) -> None:
        """Ask the tokenizer how it treats each character not met before, and extend the expression by the answer."""
        new = set(text) - self._punctuation.keys()
        if not new:
            return
        for character in new:
            pieces = len(self._backend.pre_tokenizer.pre_tokenize_str(f"a{character}a"))
            self._punctuation[character] = {1: "word", 2: "space", 3: "punctuation"}[pieces]
        by_kind = {
            kind: "".join(
                re.escape(c) for c, found in sorted(self._punctuation.items()) if found == kind and c != _LINE_END
            )
            for kind in ("space", "punctuation")
        }
        punctuation = by_kind["punctuation"]
        isolated = f"[{punctuation}]|" if punctuation else ""
        self._words = re.compile(f"[^ {by_kind['space']}{punctuation}{_LINE_END}]+|{isolated}{_LINE_END}")

    def _look_up(self, words: list[str], line_end: str) -> Encoded:
        number_of = self._number_of
        number_of[line_end] = 0
        numbers = np.fromiter(map(number_of.__getitem__, words), dtype=np.int64, count=len(words))
        del number_of[line_end]
        self._remember(number_of.take_new())
        sizes = self._sizes[numbers]
        ends = np.cumsum(sizes)
        total = int(ends[-1]) if len(ends) else 0
        # Token t of a word that begins at `first` is the table's entry first-of-word + (t - first).
        firsts = ends - sizes
        ids = self._table[np.repeat(self._firsts[numbers] - firsts, sizes) + np.arange(total)]
        starts = np.zeros(total, dtype=bool)
        starts[firsts[sizes > 0]] = True
        return Encoded(ids, starts, ends[numbers == 0])

    def _remember(self, words: list[str]) -> None:
        """Add the ids of words that were numbered just now to the table."""
        if not words:
            return
        found = [encoding.ids for encoding in self._backend.encode_batch_fast(words, add_special_tokens=False)]
        sizes = np.array([len(ids) for ids in found], dtype=np.int64)
        first = len(self._table) + np.cumsum(sizes) - sizes
        self._table = np.concatenate([self._table, *(np.array(ids, dtype=np.int32) for ids in found)])
        self._sizes = np.concatenate([self._sizes, sizes])
        self._firsts = np.concatenate([self._firsts, first])

    def _forget(self) -> None:
        self._number_of = _Numbers()
        self._table = np.empty(0, dtype=np.int32)
        self._sizes = np.zeros(1, dtype=np.int64)
        self._firsts = np.zeros(1, dtype=np.int64)

    def _encode_plainly(self, sentence: str) -> tuple[np.ndarray, np.ndarray]:
        encoding = self._backend.encode(sentence, add_special_tokens=False)
        words = np.array([-1 if word is None else word for word in encoding.word_ids], dtype=np.int64)
        starts = np.ones(len(words), dtype=bool)
        starts[1:] = (words[1:] != words[:-1]) | (words[1:] < 0)
        if not self._is_bert:
            starts |= _after_blanks(sentence, encoding)
        return np.array(encoding.ids, dtype=np.int32), starts


def _after_blanks(sentence: str, encoding: Encoding) -> np.ndarray:
    """[T] whether a token begins with a blank, or stands after one that is not a token by itself.

    Some tokenizers do not split a sentence into words, or not at every blank, and count it as one word.
    """
    starts = np.zeros(len(encoding), dtype=bool)
    covered = 0  # up to where tokens have taken the sentence
    ends_word = False  # whether the token before has a blank behind its letters
    for place, (token, (begin, end)) in enumerate(zip(encoding.tokens, encoding.offsets, strict=True)):
        passed = sentence[covered : begin + 1] if begin >= covered else ""
        starts[place] = ends_word or token.startswith(_WORD_MARKS) or any(map(str.isspace, passed))
        text = sentence[begin:end]
        ends_word = bool(text.strip()) and text[-1].isspace()
        covered = max(covered, end)
    return starts


_NO_IDS = np.empty(0, dtype=np.int32)
_NO_STARTS = np.empty(0, dtype=bool)


def _split(encoded: Encoded) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    first = 0
    for end in encoded.ends.tolist():
        yield encoded.ids[first:end], encoded.word_starts[first:end]
        first = end


def _assemble(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Encoded:
    ids = np.concatenate([_NO_IDS, *(part[0] for part in parts)])
    starts = np.concatenate([_NO_STARTS, *(part[1] for part in parts)])
    return Encoded(ids, starts, np.cumsum([len(part[0]) for part in parts], dtype=np.int64))
