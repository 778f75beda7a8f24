"""Detects how a text is laid out: sentences or paragraphs per line, articles with titles, or lines broken anywhere."""

import re

LAYOUTS = ("auto", "sentences", "paragraphs", "articles", "running")

# Sentence ends that a space follows: Latin and most others, Devanagari, Arabic and Urdu, Armenian, Ethiopic, Khmer,
# Myanmar. In Chinese and Japanese the next sentence follows at once.
_ENDS = ".!?…।॥؟۔։።፧។៕။"
_WIDE_ENDS = "。！？｡"
_CLOSING = "\"')\\]”’»」』）"
_OPENING = "\"'(“‘«"
_NEXT_SENTENCE = re.compile(rf"[{_ENDS}][{_CLOSING}]*\s+[{_OPENING}]?(\w)")
_NEXT_WIDE_SENTENCE = re.compile(rf"[{_WIDE_ENDS}][{_CLOSING}]*[^\s{_CLOSING}{_WIDE_ENDS}]")
_HEADING = re.compile(r"\s*((?:=\s+)+)[^=\s](?:.*[^=\s])?((?:\s+=)+)\s*")
_LINE_END = re.compile(rf"[{_ENDS}{_WIDE_ENDS}:;：；][{_CLOSING}]*$")


def layout_of(sample: str) -> str:
    """Return the layout of a text, given its beginning.

    sentences   one sentence per line, a blank line between documents
    paragraphs  one paragraph per line, a blank line between documents
    articles    as in WikiText: a heading ` = Title = ` before each document, one paragraph per line between blank lines
    running     lines broken anywhere, a blank line between paragraphs; the file is one document
    """
    lines = [line.strip() for line in sample.split("\n") if line.strip()]
    if not lines:
        return "sentences"
    levels = [heading_level(line) for line in lines]
    if levels[0] == 1 or (1 in levels and max(levels) > 1):  # it begins with a title, or has titles and sections
        return "articles"
    closed = sum(1 for line in lines if _LINE_END.search(line)) / len(lines)
    several = sum(1 for line in lines if _has_several_sentences(line)) / len(lines)
    if closed < 0.5:
        return "running"
    return "paragraphs" if several > 0.3 else "sentences"


def heading_level(line: str) -> int:
    """Return 1 for ` = Title = `, which begins an article, 2 or more for ` = = Section = = `, and 0 for other lines."""
    found = _HEADING.fullmatch(line)
    return len(found[1].split()) if found and found[1].split() == found[2].split() else 0


def _has_several_sentences(line: str) -> bool:
    """Whether a sentence ends inside the line. After an abbreviation, the next word starts with a small letter."""
    if _NEXT_WIDE_SENTENCE.search(line):
        return True
    return any(letter.isalpha() and not letter.islower() for letter in _NEXT_SENTENCE.findall(line))
