"""Numbers the words of a text by array operations, without a Python object per word.

A word of up to 16 bytes is its own key: two 64-bit integers, which an open-addressing hash table in numpy arrays maps
to the word's number. W words in a batch.
"""

import string

import numpy as np

_LETTER, _SIGN = 1, 2  # classes of bytes: a run of letters is a word, a sign is one by itself, others separate words
_KEY_BYTES = 8
_WORDS_AT_ONCE = 2**14  # what fits the processor's cache
_MIN_SLOTS = 2**16
_MAX_FILL = 0.5  # of the slots
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], dtype=np.uint64)  # odd, with random bits
_LOW_BYTES = np.array([2 ** (8 * size) - 1 for size in range(_KEY_BYTES + 1)], dtype=np.uint64)
_LONG_WORD = np.uint64(0xFF << 56)  # marks the key of a longer word; no UTF-8 text contains the byte 0xFF


_CLASSES = bytes(
    _LETTER if byte >= 0x80 or chr(byte).isalnum() else _SIGN if chr(byte) in "\n" + string.punctuation else 0
    for byte in range(256)
)


class WordTable:
    """word → number, from 0 on. Takes 20 bytes per slot, 40 to 80 per word."""

    def __init__(self) -> None:
        self._long: dict[bytes, int] = {}  # words of more than 16 bytes
        self._count = 0
        self._allocate(_MIN_SLOTS)

    def __len__(self) -> int:
        return self._count

    def number(self, text: bytes) -> tuple[np.ndarray, list[str]]:
        """Return the [W] numbers of the words of UTF-8 `text`, which has no byte 0, and the words that are new.

        A word is a run of letters, digits and non-ASCII characters, or an ASCII sign, or a line break.
        """
        classes = np.frombuffer(text.translate(_CLASSES), np.uint8)
        is_letter = np.zeros(len(text) + 2, dtype=bool)
        np.equal(classes, _LETTER, out=is_letter[1:-1])
        is_sign = classes == _SIGN
        starts = np.flatnonzero(is_sign | (is_letter[1:-1] > is_letter[:-2]))
        ends = np.flatnonzero(is_sign | (is_letter[1:-1] > is_letter[2:])) + 1
        padded = text + bytes(2 * _KEY_BYTES)
        numbers = np.empty(len(starts), dtype=np.int32)
        new: list[str] = []
        for first in range(0, len(starts), _WORDS_AT_ONCE):
            batch = slice(first, first + _WORDS_AT_ONCE)
            numbers[batch] = self._number_batch(padded, starts[batch], ends[batch], new)
        return numbers, new

    def _number_batch(self, text: bytes, starts: np.ndarray, ends: np.ndarray, new: list[str]) -> np.ndarray:
        while self._count + len(starts) > _MAX_FILL * len(self._numbers):
            self._grow()
        low, high = self._keys(text, starts, ends - starts)
        slots, claimed = self._claim(low, high)
        self._numbers[slots[claimed]] = np.arange(self._count, self._count + len(claimed))
        self._count += len(claimed)
        places = zip(starts[claimed].tolist(), ends[claimed].tolist(), strict=True)
        new.extend(text[start:end].decode() for start, end in places)
        return self._numbers[slots]

    def _keys(self, text: bytes, starts: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return [W] the first and the second eight bytes of each word, filled with zeros."""
        # Eight bytes from every position on; numpy reads integers at any address.
        eight = np.ndarray(len(text) - _KEY_BYTES + 1, "<u8", text, strides=(1,))
        low = eight[starts] & _LOW_BYTES[np.minimum(sizes, _KEY_BYTES)]
        high = np.zeros_like(low)
        longer = np.flatnonzero(sizes > _KEY_BYTES)
        rest = np.minimum(sizes[longer] - _KEY_BYTES, _KEY_BYTES)
        high[longer] = eight[starts[longer] + _KEY_BYTES] & _LOW_BYTES[rest]
        for place in longer[sizes[longer] > 2 * _KEY_BYTES].tolist():
            word = text[starts[place] : starts[place] + sizes[place]]
            low[place] = _LONG_WORD | np.uint64(self._long.setdefault(word, len(self._long)))
            high[place] = 0
        return low, high

    def _claim(self, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return [W] the slot of each key, and the places of those keys that had none before, each once."""
        slots = self._find(low, high)
        free = np.flatnonzero(self._low[slots] == 0)
        claimed = [free[:0]]
        while len(free):
            # Of the keys that found the same free slot, one stays in it.
            self._numbers[slots[free]] = free
            won = free[self._numbers[slots[free]] == free]
            self._low[slots[won]], self._high[slots[won]] = low[won], high[won]
            claimed.append(won)
            slots[free] = self._find(low[free], high[free])
            free = free[self._low[slots[free]] == 0]
        return slots, np.concatenate(claimed)

    def _find(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Return [W] the slot of each key, or the free slot that it may have."""
        slots = ((low ^ (high * _FACTORS[0])) * _FACTORS[1] >> self._shift).astype(np.int64)
        places = np.flatnonzero(self._has_other(slots, low, high))
        while len(places):
            slots[places] = (slots[places] + 1) % len(self._numbers)
            places = places[self._has_other(slots[places], low[places], high[places])]
        return slots

    def _has_other(self, slots: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Return [W] whether another key has the slot."""
        found = self._low[slots]
        return ((found != low) | (self._high[slots] != high)) & (found != 0)

    def _allocate(self, num_slots: int) -> None:
        self._shift = np.uint64(64 - (num_slots - 1).bit_length())
        self._low, self._high = np.zeros((2, num_slots), dtype=np.uint64)  # low = 0: a free slot
        self._numbers = np.zeros(num_slots, dtype=np.int32)

    def _grow(self) -> None:
        used = np.flatnonzero(self._low)
        low, high, numbers = self._low[used], self._high[used], self._numbers[used]
        self._allocate(2 * len(self._numbers))
        slots, _ = self._claim(low, high)
        self._numbers[slots] = numbers
