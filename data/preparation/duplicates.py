"""Finds exact duplicates by hash, and near duplicates by MinHash."""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from data.text.sentences import split_words

DROPPED = 0  # in place of a document's hash
# A safe prime, so that powers of 256 repeat only after (p - 1) / 2 steps; below 2**90, up to where Python divides in
# three steps.
_MODULUS = 0x1890C7607D32136E201CB4F
_HASHES_AT_ONCE = 4_000_000  # compared in memory together: 32 MB and some temporaries
_PERMUTATIONS = 64
_SHINGLE_WORDS = 5
_MAX_WORDS = 20_000  # of a document that are compared


class DocumentHash:
    """A 64-bit hash of a document's characters except white space, whose places depend on how it is split."""

    def __init__(self) -> None:
        self._value = 0  # the UTF-8 bytes as one large number, modulo a prime
        self._length = 0

    def update(self, text: str) -> None:
        content = text.encode().translate(None, b" \n")  # the only white space in cleaned text
        self._value = (self._value * pow(256, len(content), _MODULUS) + int.from_bytes(content, "big")) % _MODULUS
        self._length += len(content)

    def result(self) -> int:
        """Return the hash, which is never `DROPPED`."""
        digest = hashlib.blake2b(b"%d %d" % (self._value, self._length), digest_size=8).digest()
        return int.from_bytes(digest, "little") or 1


def drop_repeated(hashes: Sequence[np.ndarray]) -> int:
    """Set every hash that occurred before to `DROPPED`, in place; return how many.

    Hashes are compared one residue class at a time, so that sorting takes a fixed amount of memory.
    """
    num_classes = max(1, -(-sum(map(len, hashes)) // _HASHES_AT_ONCE))
    dropped = 0
    for residue in range(num_classes):
        chosen = [np.flatnonzero(found % np.uint64(num_classes) == residue) for found in hashes]
        values = np.concatenate([found[index] for found, index in zip(hashes, chosen, strict=True)])
        _, first_seen = np.unique(values, return_index=True)
        is_first = np.zeros(len(values), dtype=bool)
        is_first[first_seen] = True
        bounds = np.cumsum([len(index) for index in chosen])[:-1]
        for found, index, kept in zip(hashes, chosen, np.split(is_first, bounds), strict=True):
            found[index[~kept]] = DROPPED
        dropped += len(values) - len(first_seen)
    return dropped


def _permutations() -> tuple[np.ndarray, np.ndarray]:
    """Return the factors and offsets of affine maps on 32 bits; an odd factor makes a map a permutation."""
    rng = np.random.RandomState(1)
    factors = rng.randint(0, 2**31, _PERMUTATIONS, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    return factors, rng.randint(0, 2**32, _PERMUTATIONS, dtype=np.uint32)


_FACTORS, _OFFSETS = _permutations()


def sign(text: str) -> np.ndarray:
    """Return the [64] MinHash of the text's runs of five words (or characters, in scripts without spaces)."""
    words = split_words(text.lower())[:_MAX_WORDS]
    shingles = {" ".join(words[i : i + _SHINGLE_WORDS]) for i in range(max(1, len(words) - _SHINGLE_WORDS + 1))}
    digests = b"".join(hashlib.sha1(shingle.encode(), usedforsecurity=False).digest()[:4] for shingle in shingles)
    values = np.frombuffer(digests, dtype="<u4").astype(np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # MurmurHash3's finalizer
        values = (values ^ (values >> np.uint32(shift))) * np.uint32(factor)
    values ^= values >> np.uint32(16)
    return np.array([(values * a + b).min() for a, b in zip(_FACTORS, _OFFSETS, strict=True)], dtype=np.uint32)


def band_shape(threshold: float) -> tuple[int, int]:
    """Return (bands, hashes per band) with the fewest false positives and negatives at a similarity threshold.

    A pair of similarity s shares a band with probability 1 - (1 - s**rows)**bands.
    """
    similarity = (np.arange(1000) + 0.5) / 1000
    is_similar = similarity >= threshold

    def error(shape: tuple[int, int]) -> float:
        found = 1 - (1 - similarity ** shape[1]) ** shape[0]
        return float(np.where(is_similar, 1 - found, found).sum())

    shapes = [(bands, rows) for bands in range(2, _PERMUTATIONS + 1) for rows in range(1, _PERMUTATIONS // bands + 1)]
    return min(shapes, key=error)


class SignatureIndex:
    """Finds similar signatures among those added, by locality-sensitive hashing in bands.

    Takes 256 bytes for the signature and about 150 per band for each document: 1 kB at a threshold of 0.8.
    datasketch's MinHashLSH takes 2.9 times the memory and three times as long.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        num_bands, self._width = band_shape(threshold)
        self._bands: list[dict[int, int | list[int]]] = [{} for _ in range(num_bands)]  # a band's hash → documents
        self._signatures = np.empty((1024, _PERMUTATIONS), dtype=np.uint32)
        self._count = 0

    def add_unless_similar(self, signature: np.ndarray) -> bool:
        """Add a document unless one at least as similar as the threshold was added before; return if it was added."""
        width = self._width
        keys = [hash(signature[i * width : (i + 1) * width].tobytes()) for i in range(len(self._bands))]
        entries = [band.get(key, []) for band, key in zip(self._bands, keys, strict=True)]
        found = [[entry] if isinstance(entry, int) else entry for entry in entries]
        candidates = sorted({number for numbers in found for number in numbers})
        if candidates and (self._signatures[candidates] == signature).mean(axis=1).max() >= self.threshold:
            return False
        if self._count == len(self._signatures):
            self._signatures = np.concatenate([self._signatures, np.empty_like(self._signatures)])
        self._signatures[self._count] = signature
        for band, key, numbers in zip(self._bands, keys, found, strict=True):
            band[key] = [*numbers, self._count] if numbers else self._count
        self._count += 1
        return True

    def drop_similar(self, hashes: np.ndarray, signatures: Iterable[np.ndarray]) -> int:
        """Add documents in order; set the hash of each similar one to `DROPPED` and return how many."""
        before = np.count_nonzero(hashes)
        for place, signature in enumerate(signatures):
            if hashes[place] != DROPPED and not self.add_unless_similar(signature):
                hashes[place] = DROPPED
        return int(before - np.count_nonzero(hashes))
