"""Draws the number of tokens per row as SVG, without a plotting library: importing one takes longer than a report."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

_WIDTH, _HEIGHT = 700, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 20, 50  # margins around the axes
_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c")
_NUM_TICKS = 8


def draw_lengths(shares: Mapping[str, Sequence[float]]) -> str:
    """A histogram for each split, with a logarithmic scale: `shares[split][k]` is the share of rows with k tokens."""
    percentages = {split: 100 * np.array(found, dtype=float) for split, found in shares.items()}
    present = np.concatenate([values[values > 0] for values in percentages.values()])
    low = math.floor(math.log10(present.min())) if len(present) else -1
    high = max(low + 1, math.ceil(math.log10(present.max()))) if len(present) else 2
    longest = max(1, *(len(values) - 1 for values in percentages.values()))

    def x(tokens: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * tokens / longest

    def y(percent: float) -> float:
        place = (math.log10(percent) - low) / (high - low) if percent > 0 else 0
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * place

    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = [_text(_WIDTH / 2, _HEIGHT - 12, "tokens per row"), _text(32, _TOP + 4, "% of rows")]
    for power in range(low, high + 1):
        parts.append(_line(_LEFT, y(10.0**power), right, y(10.0**power), "#ddd"))
        parts.append(_text(_LEFT - 8, y(10.0**power) + 4, f"{10.0**power:g}", "end"))
    for tokens in range(0, longest + 1, max(1, longest // _NUM_TICKS)):
        parts.append(_text(x(tokens), bottom + 18, str(tokens)))
    parts.append(_line(_LEFT, bottom, right, bottom, "black") + _line(_LEFT, _TOP, _LEFT, bottom, "black"))
    for number, (split, values) in enumerate(percentages.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        steps = " ".join(f"H{x(k - 0.5):.1f}V{y(value):.1f}" for k, value in enumerate(values.tolist()))
        parts.append(f'<path d="M{x(0):.1f} {bottom}{steps}H{right}" fill="none" stroke="{colour}"/>')
        parts.append(_text(_LEFT + 12, _TOP + 30 + 18 * number, split, "start", colour))
    header = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif">'
    return "\n".join([header, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


def _line(x: float, y: float, to_x: float, to_y: float, colour: str) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle", colour: str = "black") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="12" fill="{colour}">{text}</text>'
