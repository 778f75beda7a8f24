"""Which documents to drop: exact duplicates always, near duplicates on request."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from data.compression import optional_import
from data.store import WorkFolder
from data.words import split_words

_HASHES_AT_ONCE = 4_000_000  # compared in memory together: 32 MB and some temporaries
_PERMUTATIONS = 64
_SCHEME = "affine32"  # of the permutations; signatures of two schemes cannot be compared
_SHINGLE_WORDS = 5
_LONGEST = 20_000  # words of a document that are compared


def mark_repeated(hashes: Sequence[np.ndarray], keep: Sequence[np.ndarray]) -> int:
    """Clear `keep` for every document whose hash an earlier one has; returns how many.

    Hashes are compared residue class by residue class, so the sorting never takes more than a fixed amount of memory.
    """
    total = sum(len(found) for found in hashes)
    classes = max(1, -(-total // _HASHES_AT_ONCE))
    firsts = np.cumsum([0] + [len(found) for found in hashes])[:-1]
    flat = np.ones(total, dtype=bool)
    for residue in range(classes):
        chosen = [np.flatnonzero(found % np.uint64(classes) == residue) for found in hashes]
        numbers = np.concatenate([index + first for index, first in zip(chosen, firsts, strict=True)])
        values = np.concatenate([found[index] for found, index in zip(hashes, chosen, strict=True)])
        _, first_seen = np.unique(values, return_index=True)
        flat[numbers] = False
        flat[numbers[first_seen]] = True
    for mask, first in zip(keep, firsts, strict=True):
        mask &= flat[first : first + len(mask)]
    return int(total - flat.sum())


def sign(text: str) -> np.ndarray:
    """[64] MinHash of a document's runs of five words, lower-cased; of five characters where there are no blanks."""
    datasketch = optional_import("datasketch", "--near_duplicates")
    words = split_words(text.lower())[:_LONGEST]
    shingles = {" ".join(words[i : i + _SHINGLE_WORDS]) for i in range(max(1, len(words) - _SHINGLE_WORDS + 1))}
    signature = datasketch.MinHash(num_perm=_PERMUTATIONS, seed=1, scheme=_SCHEME)
    signature.update_batch([shingle.encode() for shingle in sorted(shingles)])
    return np.asarray(signature.hashvalues, dtype=np.uint64)


def mark_similar(folder: WorkFolder, pieces: Sequence[str], keep: Sequence[np.ndarray], threshold: float) -> int:
    """Clear `keep` for every document that is similar to an earlier one that is kept; returns how many.

    The index of signatures is in memory: about 2 kB a document that is kept.
    """
    datasketch = optional_import("datasketch", "--near_duplicates")
    index = datasketch.MinHashLSH(threshold=threshold, num_perm=_PERMUTATIONS)
    kept: dict[str, Any] = {}
    dropped = 0
    for name, mask, place, values in _signatures(folder, pieces, keep):
        signature = datasketch.MinHash(num_perm=_PERMUTATIONS, seed=1, scheme=_SCHEME, hashvalues=values)
        if any(signature.jaccard(kept[other]) >= threshold for other in index.query(signature)):
            mask[place] = False
            dropped += 1
        else:
            kept[name] = signature
            index.insert(name, signature)
    return dropped


def _signatures(
    folder: WorkFolder, pieces: Sequence[str], keep: Sequence[np.ndarray]
) -> Iterator[tuple[str, np.ndarray, int, np.ndarray]]:
    for piece, mask in zip(pieces, keep, strict=True):
        values = folder.load_array("signatures", piece)
        for place in np.flatnonzero(mask).tolist():
            yield f"{piece}:{place}", mask, place, values[place]
