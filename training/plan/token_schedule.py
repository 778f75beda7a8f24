"""Values that change with the tokens seen: `0:0.30,100M:0.15` as points of (tokens, value)."""

import re
from dataclasses import dataclass, field

from common.errors import UserError

UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
POINT = re.compile(r"(\d+(?:\.\d+)?)([kMGT]?):(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class TokenSchedule:
    """Points in rising order of tokens; the first is at 0. `text` is what the user wrote."""

    points: tuple[tuple[int, float], ...]
    text: str = field(default="", compare=False)

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> "TokenSchedule":
        """One value for the whole run, or comma-separated `tokens:value` points."""
        if re.fullmatch(r"\d+(\.\d+)?", text):
            return cls(((0, float(text)),), text)
        points = []
        for part in text.split(","):
            match = POINT.fullmatch(part.strip())
            if match is None:
                raise UserError(
                    f"found {part!r}, expected a single value, or comma-separated points tokens:value, such as "
                    f"0:0.30,100M:0.15 (units: k, M, G, T)"
                )
            number, unit, value = match.groups()
            points.append((round(float(number) * UNITS[unit]), float(value)))
        tokens = [position for position, _ in points]
        if tokens != sorted(set(tokens)) or tokens[0] != 0:
            raise UserError(f"found points at {tokens} tokens, expected numbers that start at 0 and rise")
        return cls(tuple(points), text)

    @property
    def is_constant(self) -> bool:
        return len(self.points) == 1

    def in_steps(self, tokens_per_step: float, tokens_before: float = 0.0) -> tuple[tuple[int, float], ...]:
        """The same points with steps in place of tokens; of two points at the same step, the later one counts.

        Steps are counted from `tokens_before`, so points before the first step have negative numbers.
        """
        return tuple(
            {round((tokens - tokens_before) / tokens_per_step): value for tokens, value in self.points}.items()
        )
