"""Encodes many sentences at once to token ids, and marks where each word begins.

BERT's tokenizer treats every word separately, so a word needs to be split into pieces only once: after that, ASCII text
costs a few array operations (`data/instances/words.py`). Other sentences are split into words by the tokenizer's own
rules. The tests compare the ids with those of the tokenizer.
"""

import re
import string
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding, models

from data.instances.words import WordTable
from data.tokenizer import SPACE_MARKS, BertTokenizer

_LOWER_CASE = bytes.maketrans(string.ascii_uppercase.encode(), string.ascii_lowercase.encode())
_CONTROLS = bytes([*range(9), 11, 12, *range(14, 32), 127])  # ASCII's, without white space
_MAX_REMEMBERED = 200_000  # words; about 80 bytes each. Then the table starts over


class Encoded(NamedTuple):
    """Token ids of several sentences, concatenated."""

    ids: np.ndarray  # [T] int32
    word_starts: np.ndarray  # [T] bool
    ends: np.ndarray  # [sentences] int64, in tokens


class _WordPieces:
    """Splits a word into the longest pieces of a vocabulary, from its beginning on; a sixth of the library's time."""

    def __init__(self, model: models.WordPiece, vocabulary: dict[str, int]) -> None:
        prefix = model.continuing_subword_prefix
        self._first = vocabulary
        self._rest = {token[len(prefix) :]: i for token, i in vocabulary.items() if token.startswith(prefix)}
        self._max_piece = max(map(len, vocabulary))
        self._max_word = model.max_input_chars_per_word
        self._unknown = [vocabulary[model.unk_token]]

    def split(self, word: str) -> list[int]:
        """Return the ids of the word's pieces; that of the unknown token alone if a part of the word has none."""
        size = len(word)
        if size > self._max_word:
            return self._unknown
        ids: list[int] = []
        start, pieces = 0, self._first
        while start < size:
            for end in range(min(size, start + self._max_piece), start, -1):
                if (found := pieces.get(word[start:end])) is not None:
                    break
            else:
                return self._unknown
            ids.append(found)
            start, pieces = end, self._rest
        return ids


class Encoder:
    """Encodes with one tokenizer, and remembers the ids of words."""

    def __init__(self, tokenizer: BertTokenizer) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self._is_bert = tokenizer.is_bert
        self._backend = tokenizer.backend
        self._lower_case = tokenizer.lower_case
        added = list(self._backend.get_added_tokens_decoder().values())
        # An added token that is matched after normalisation may consist of several words.
        vocabulary = self._backend.get_vocab(with_added_tokens=False)
        has_unknown = self._is_bert and self._backend.model.unk_token in vocabulary
        self._is_word_wise = has_unknown and not any(token.normalized for token in added)
        if self._is_word_wise:
            self._pieces = _WordPieces(self._backend.model, vocabulary)
        # Text that contains one of the others is never split there; an empty alternative list matches nothing.
        self._added = re.compile("|".join(re.escape(token.content) for token in added) or r"(?!)")
        # By the mark of a space at the beginning or, after other characters, at the end of a token.
        self._begins_word, self._ends_word = np.zeros((2, self.vocab_size), dtype=bool)
        for token, i in tokenizer.vocabulary.items() if tokenizer.marks_spaces else ():
            self._begins_word[i] = token.startswith(SPACE_MARKS)
            self._ends_word[i] = len(token) > 1 and token.endswith(SPACE_MARKS)
        self._forget()

    def _forget(self) -> None:
        self._words = WordTable()
        self._words.number(b"\n")  # word 0 is the end of a sentence
        self._table = np.empty(0, dtype=np.int32)  # ids of all known words, concatenated
        self._sizes = np.zeros(1, dtype=np.int64)  # ids per word; the end of a sentence has none
        self._firsts = np.zeros(1, dtype=np.int64)  # position of each word's ids in the table

    def encode_documents(self, documents: Sequence[Sequence[str]]) -> Encoded:
        """Return the ids of all sentences of all documents.

        The sentences of a document are separated by spaces, which are part of the next word for some tokenizers.
        """
        separator = " " if self.tokenizer.keeps_first_space else ""
        return self.encode([separator * bool(i) + text for document in documents for i, text in enumerate(document)])

    def encode(self, sentences: Sequence[str]) -> Encoded:
        """Return ids without [CLS] and [SEP]. A sentence may have none."""
        if len(self._words) > _MAX_REMEMBERED:
            self._forget()
        if self._is_word_wise and not self._added.search("\n".join(sentences)):
            return self._encode_words(sentences)
        is_wordy = [self._is_word_wise and not self._added.search(sentence) for sentence in sentences]
        parts = _split(
            self._encode_words([sentence for sentence, found in zip(sentences, is_wordy, strict=True) if found])
        )
        return _concatenate(
            [
                next(parts) if found else self._encode_sentence(sentence)
                for sentence, found in zip(sentences, is_wordy, strict=True)
            ]
        )

    def _separated(self, sentences: Sequence[str]) -> bytes:
        """Return the sentences such that `WordTable` finds BERT's words, with a line break after each sentence."""
        text = "\n".join([*sentences, ""])
        if not text.isascii() or text.count("\n") > len(sentences):
            text = "\n".join([*map(self._separate, sentences), ""])
        return text.encode().translate(_LOWER_CASE if self._lower_case else None, _CONTROLS)

    def _separate(self, sentence: str) -> str:
        if sentence.isascii():
            return sentence.replace("\n", " ")
        normal = self._backend.normalizer.normalize_str(sentence)
        return " ".join([word for word, _ in self._backend.pre_tokenizer.pre_tokenize_str(normal)])

    def _encode_words(self, sentences: Sequence[str]) -> Encoded:
        numbers, new = self._words.number(self._separated(sentences))
        self._remember(new)
        sizes = self._sizes[numbers]
        ends = np.cumsum(sizes)
        total = int(ends[-1]) if len(ends) else 0
        # Token t of a word whose tokens begin at `first` is the table's entry first-of-word + (t - first).
        firsts = ends - sizes
        ids = self._table[np.repeat(self._firsts[numbers] - firsts, sizes) + np.arange(total)]
        starts = np.zeros(total, dtype=bool)
        starts[firsts[sizes > 0]] = True
        return Encoded(ids, starts, ends[numbers == 0])

    def _remember(self, words: list[str]) -> None:
        """Add the ids of newly numbered words to the table."""
        if not words:
            return
        found = list(map(self._pieces.split, words))
        sizes = np.array(list(map(len, found)), dtype=np.int64)
        first = len(self._table) + np.cumsum(sizes) - sizes
        self._table = np.concatenate([self._table, np.fromiter(chain.from_iterable(found), np.int32, sizes.sum())])
        self._sizes = np.concatenate([self._sizes, sizes])
        self._firsts = np.concatenate([self._firsts, first])

    def _encode_sentence(self, sentence: str) -> tuple[np.ndarray, np.ndarray]:
        encoding = self._backend.encode(sentence, add_special_tokens=False)
        words = np.array([-1 if word is None else word for word in encoding.word_ids], dtype=np.int64)
        starts = np.ones(len(words), dtype=bool)
        starts[1:] = (words[1:] != words[:-1]) | (words[1:] < 0)
        ids = np.array(encoding.ids, dtype=np.int32)
        if self.tokenizer.marks_spaces:
            starts |= self._begins_word[ids]
            starts[1:] |= self._ends_word[ids[:-1]]
        elif not self._is_bert:
            starts |= _after_spaces(sentence, encoding)
        return ids, starts


def _after_spaces(sentence: str, encoding: Encoding) -> np.ndarray:
    """Return [T] whether a token begins with a space, or follows one that is not a token.

    Some tokenizers do not split a sentence into words, or not at every space, and report one word for all of it.
    """
    starts = np.zeros(len(encoding), dtype=bool)
    covered = 0  # position up to which tokens cover the sentence
    ends_word = False  # whether the previous token ends with a space
    for place, (token, (begin, end)) in enumerate(zip(encoding.tokens, encoding.offsets, strict=True)):
        passed = sentence[covered : begin + 1] if begin >= covered else ""
        starts[place] = ends_word or token.startswith(SPACE_MARKS) or any(map(str.isspace, passed))
        text = sentence[begin:end]
        ends_word = bool(text.strip()) and text[-1].isspace()
        covered = max(covered, end)
    return starts


def _split(encoded: Encoded) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    first = 0
    for end in encoded.ends.tolist():
        yield encoded.ids[first:end], encoded.word_starts[first:end]
        first = end


def _concatenate(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Encoded:
    ids = np.concatenate([np.empty(0, dtype=np.int32), *(part[0] for part in parts)])
    starts = np.concatenate([np.empty(0, dtype=bool), *(part[1] for part in parts)])
    return Encoded(ids, starts, np.cumsum([len(part[0]) for part in parts], dtype=np.int64))
