"""A text's fingerprint, which can also be put together from those of its parts, wherever it was cut."""

from hashlib import blake2b
from typing import NamedTuple

# A prime p for which (p - 1) / 2 is one too, so that powers of 2 take (p - 1) / 2 steps at least to come around. Below
# 2**90, up to where Python divides in three steps.
_MODULUS = 0x1890C7607D32136E201CB4F
_WHITE_SPACE = b" \n"  # all that cleaned text has


class Fingerprint(NamedTuple):
    """The text's bytes as one large number, modulo a prime, and how many there are. White space does not count.

    Where sentences end depends on where a very large text was cut, its other characters do not.
    """

    value: int = 0
    length: int = 0

    @classmethod
    def of(cls, text: str) -> "Fingerprint":
        content = text.encode().translate(None, _WHITE_SPACE)
        return cls(int.from_bytes(content, "big") % _MODULUS, len(content))

    def followed_by(self, other: "Fingerprint") -> "Fingerprint":
        """That of both texts, one after the other."""
        shifted = self.value * pow(256, other.length, _MODULUS)
        return Fingerprint((shifted + other.value) % _MODULUS, self.length + other.length)

    @property
    def hash(self) -> int:
        """In 64 bits, never 0. A remainder of the value would be the same for texts that differ in a few letters."""
        digest = blake2b(b"%d %d" % (self.value, self.length), digest_size=8).digest()
        return int.from_bytes(digest, "little") or 1
