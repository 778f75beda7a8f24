"""Which documents to drop: exact duplicates always, near duplicates on request."""

from collections.abc import Sequence

import numpy as np

from common.console import console
from data.preparation.work_folder import WorkFolder
from data.text.compression import optional_import
from data.text.words import split_words

GOES_ON = 0  # instead of a hash: a further part of the document before
_HASHES_AT_ONCE = 4_000_000  # compared in memory together: 32 MB and some temporaries
_PERMUTATIONS = 64
_SCHEME = "affine32"  # of the permutations; signatures of two schemes cannot be compared
_SHINGLE_WORDS = 5
_MAX_BYTES = 20_000  # words of a document that are compared


def mark_repeated(hashes: Sequence[np.ndarray], keep: Sequence[np.ndarray]) -> int:
    """Clear `keep` for every document whose hash an earlier one has; returns how many documents that are.

    There is a hash for each text: that of the document which it begins, or GOES_ON for a further part of the one
    before, which is kept or dropped with it. Hashes are compared residue class by residue class, so the sorting never
    takes more than a fixed amount of memory.
    """
    total = sum(len(found) for found in hashes)
    classes = max(1, -(-total // _HASHES_AT_ONCE))
    firsts = np.cumsum([0] + [len(found) for found in hashes])[:-1]
    flat = np.ones(total, dtype=bool)
    for residue in range(classes):
        chosen = [np.flatnonzero((found % np.uint64(classes) == residue) & (found != GOES_ON)) for found in hashes]
        numbers = np.concatenate([index + first for index, first in zip(chosen, firsts, strict=True)])
        values = np.concatenate([found[index] for found, index in zip(hashes, chosen, strict=True)])
        _, first_seen = np.unique(values, return_index=True)
        flat[numbers] = False
        flat[numbers[first_seen]] = True
    is_kept = True  # the document that the piece before has ended with
    for found, mask, first in zip(hashes, keep, firsts, strict=True):
        kept = np.append(flat[first : first + len(mask)], is_kept)  # the last is where -1 looks
        begins = np.maximum.accumulate(np.where(found != GOES_ON, np.arange(len(found)), -1))
        mask &= kept[begins]
        is_kept = bool(kept[begins[-1]]) if len(begins) else is_kept
    return int(total - flat.sum())


def sign(text: str) -> np.ndarray:
    """[64] MinHash of a document's runs of five words, lower-cased; of five characters where there are no blanks."""
    datasketch = optional_import("datasketch", "--near_duplicates")
    words = split_words(text.lower())[:_MAX_BYTES]
    shingles = {" ".join(words[i : i + _SHINGLE_WORDS]) for i in range(max(1, len(words) - _SHINGLE_WORDS + 1))}
    signature = datasketch.MinHash(num_perm=_PERMUTATIONS, seed=1, scheme=_SCHEME)
    signature.update_batch([shingle.encode() for shingle in sorted(shingles)])
    return np.asarray(signature.hashvalues, dtype=np.uint64)


class SignatureIndex:
    """The signatures of documents that are kept, found by what they share: MinHash's usual bands.

    In memory: 256 bytes of signature and about 150 a band for each document, 1 kB at a threshold of 0.8.
    """

    def __init__(self, threshold: float) -> None:
        datasketch = optional_import("datasketch", "--near_duplicates")
        shape = datasketch.MinHashLSH(threshold=threshold, num_perm=_PERMUTATIONS)
        self.threshold = threshold
        self._width = shape.r  # hashes a band
        self._bands: list[dict[int, int | list[int]]] = [{} for _ in range(shape.b)]  # a band's content → documents
        self._signatures = np.empty((1024, _PERMUTATIONS), dtype=np.uint32)
        self._count = 0

    def add_unless_similar(self, signature: np.ndarray) -> bool:
        """Add a document, unless one that was added before is as similar as the threshold; whether it was added."""
        values = signature.astype(np.uint32)
        keys = [hash(values[i * self._width : (i + 1) * self._width].tobytes()) for i in range(len(self._bands))]
        candidates = sorted(
            {number for band, key in zip(self._bands, keys, strict=True) for number in _listed(band, key)}
        )
        if candidates and (self._signatures[candidates] == values).mean(axis=1).max() >= self.threshold:
            return False
        if self._count == len(self._signatures):
            self._signatures = np.concatenate([self._signatures, np.empty_like(self._signatures)])
        self._signatures[self._count] = values
        for band, key in zip(self._bands, keys, strict=True):
            found = _listed(band, key)
            band[key] = [*found, self._count] if found else self._count
        self._count += 1
        return True


def _listed(band: dict[int, int | list[int]], key: int) -> list[int]:
    found = band.get(key, [])
    return [found] if isinstance(found, int) else found


def mark_similar(folder: WorkFolder, pieces: Sequence[str], keep: Sequence[np.ndarray], threshold: float) -> int:
    """Clear `keep` for every document that is similar to an earlier one that is kept; returns how many."""
    index = SignatureIndex(threshold)
    dropped = 0
    with console.progress(total=len(pieces), desc="comparing", unit="piece", in_lines=True) as bar:
        for piece, mask in zip(pieces, keep, strict=True):
            signatures = folder.load_array("signatures", piece)
            for place in np.flatnonzero(mask).tolist():
                mask[place] = index.add_unless_similar(signatures[place])
                dropped += not mask[place]
            bar.update()
    return dropped
