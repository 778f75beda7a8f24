"""Values that change with the tokens seen: `0:0.30,100M:0.15` as points of (tokens, value)."""

import re
from dataclasses import dataclass

from common.errors import UserError

UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
POINT = re.compile(r"(\d+(?:\.\d+)?)([kMGT]?):(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class TokenSchedule:
    """Points in rising order of tokens; the first is at 0."""

    points: tuple[tuple[int, float], ...]

    @classmethod
    def parse(cls, text: str, flag: str) -> "TokenSchedule":
        """One value for the whole run, or `tokens:value` points with commas between."""
        if re.fullmatch(r"\d+(\.\d+)?", text):
            return cls(((0, float(text)),))
        points = []
        for part in text.split(","):
            match = POINT.fullmatch(part.strip())
            if match is None:
                raise UserError(
                    f"{flag} {text}: {part!r} is no point of a schedule; write a single value, or tokens:value with "
                    f"commas between, as in 0:0.30,100M:0.15 (k, M, G, T)"
                )
            number, unit, value = match.groups()
            points.append((round(float(number) * UNITS[unit]), float(value)))
        tokens = [place for place, _ in points]
        if tokens != sorted(set(tokens)) or tokens[0] != 0:
            raise UserError(f"{flag} {text}: the points' tokens must begin at 0 and rise, but found {tokens}")
        return cls(tuple(points))

    @property
    def is_constant(self) -> bool:
        return len(self.points) == 1

    def in_steps(self, tokens_per_step: float, tokens_before: float = 0.0) -> tuple[tuple[int, float], ...]:
        """The same points with steps in place of tokens; two that fall on one step become the later one.

        Steps are counted from `tokens_before` on, so that points may lie before the first.
        """
        return tuple(
            {round((tokens - tokens_before) / tokens_per_step): value for tokens, value in self.points}.items()
        )
