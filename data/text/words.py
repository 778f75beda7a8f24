"""What counts as a word: what stands between blanks, and each character of a script that is written without blanks."""

import re

# Thai, Lao and Tibetan; Myanmar; Khmer; Chinese and Japanese, with rarer and compatibility characters.
_WITHOUT_BLANKS = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fdf\u3005-\u3007\u3040-\u30ff\u3105-\u312f\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
_CHARACTER = re.compile(f"[{_WITHOUT_BLANKS}]")
_WORD = re.compile(rf"[{_WITHOUT_BLANKS}]|[^\s{_WITHOUT_BLANKS}]+")


def split_words(text: str) -> list[str]:
    return text.split() if text.isascii() else _WORD.findall(text)


def has_words(text: str, least: int) -> bool:
    """Whether a text of single blanks, every line ended, has so many words. Most texts are told by their blanks."""
    words = text.count(" ") + text.count("\n")
    return words >= least or (not text.isascii() and words + len(_CHARACTER.findall(text)) >= least)
