"""Random numbers as a pure function of (key, row, column): the same whatever is drawn before, beside or after them."""

import hashlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def derive_key(*parts: int | str) -> int:
    """A 64-bit key from a seed and names of what it is for; equal parts give equal keys on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def generator(*parts: int | str) -> np.random.Generator:
    """A numpy generator of its own for one task."""
    return np.random.Generator(np.random.PCG64(derive_key(*parts)))


def row_bits(key: int, rows: np.ndarray, columns: int) -> np.ndarray:
    """[len(rows), columns] uint64: splitmix64, one stream a row. About 8 ns a number."""
    seeds = _mix(rows.astype(np.uint64) * _GOLDEN + np.uint64(key))
    counters = np.arange(1, columns + 1, dtype=np.uint64) * _GOLDEN
    return _mix(seeds[:, None] + counters)


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser, in place on a fresh array; wrapping is meant."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
