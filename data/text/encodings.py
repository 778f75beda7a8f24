"""Recognises the encoding of a text from its beginning."""

import codecs
import math
import re
import unicodedata

_MIN_HEAD = 8
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_HIGH_BYTES = bytes(range(128, 256))
_HIGH_RUN = re.compile(rb"[\x80-\xff]+")
_MIN_CONTROL_SHARE = 0.02  # of bytes; a text in Chinese, whose bytes vary most, has more than 5 %
_MIN_PLAUSIBLE_SHARE = 0.95  # of characters
_COMMON = " \n,.\u3001\u3002\uff0c"  # characters that are frequent only in the right order of bytes
# The longer marks first: that of UTF-32 begins with that of UTF-16.
_MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
_MARKS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}

# The most frequent characters beyond ASCII of the languages that are written in an encoding, under the names that
# Python and iconv share. Decoded by another one, a text consists of rare characters.
_FREQUENT = {
    "windows-1252": "éèàêçùâîôëïäöüßñóíáúãåøæ\u2019\u2018\u201c\u201d\u2013\u2014\u2026«»°¿¡",
    "windows-1250": "ąęłśżźćńóčěřšžýáíéúůťďňőűöüäôșțîâ\u2019\u201e\u201d\u2013",
    "windows-1251": "оеаинтсрвлкмдпуяыьгзбчйхжіїєў",
    "koi8-r": "оеаинтсрвлкмдпуяыьгзбчйхж",
    "windows-1253": "αοιετσνηυρπκμλςάίόέήώδγ",
    "windows-1255": "יוהלאמרתבנשםפקדחכעג",
    "windows-1256": "الينمتوردبعهسفقكحجةأ",
    "tis-620": "านรอกเงมยลวดทสตะปบคหแจพช่้ัี",
    "shift_jis": "のにはをたがでてとしいるっなかられもりこす、。",
    "euc-jp": "のにはをたがでてとしいるっなかられもりこす、。",
    "euc-kr": "이다는에의가을고하지은한를로도사기서리인시",
    "gb18030": "的一是不了人在有我他这中大来上个国和地到，。",
    "big5": "的一是不了人在有我他這中大來上個國和地到，。",
}
_MIN_RUNS = 0.65  # per byte beyond ASCII, in the Latin script, where most of these stand between ASCII letters
_LATIN = ("windows-1252", "windows-1250")
_LARGE = ("shift_jis", "euc-jp", "euc-kr", "gb18030", "big5")  # with thousands of characters
_MIN_EVIDENCE = 0.3  # nats per character; a text in the encoding has about 1, random bytes have 0
_MAX_INVALID = 0.5  # of the bytes beyond ASCII: a text with fewer invalid ones is damaged UTF-8


def wide_encoding(head: bytes) -> str | None:
    """Recognise UTF-16 and UTF-32 by their mark, and UTF-16 without one by its bytes."""
    for mark, encoding in _MARKS.items():
        if head.startswith(mark):
            return encoding
    if len(head) < _MIN_HEAD:
        return None
    zeros = [head[first::2].count(0) / len(head[first::2]) for first in (0, 1)]  # shares of even and odd bytes
    for low, high, encoding in ((zeros[0], zeros[1], "utf-16-le"), (zeros[1], zeros[0], "utf-16-be")):
        if low < 0.05 and high > 0.4:  # mostly Latin text
            return encoding
    return _find_wide_script(head)


def _find_wide_script(head: bytes) -> str | None:
    """UTF-16 of any script: half of its bytes, or many of them, are control characters, which no other text has."""
    if len(_CONTROL.findall(head)) < _MIN_CONTROL_SHARE * len(head):
        return None
    texts = {encoding: _decode_head(head, encoding) for encoding in ("utf-16-le", "utf-16-be")}
    encoding = max(texts, key=lambda name: sum(texts[name].count(mark) for mark in _COMMON))
    text = texts[encoding]
    num_plausible = sum(char in "\t\n\r" or unicodedata.category(char)[0] in "LMNPSZ" for char in text)
    return encoding if text and num_plausible >= _MIN_PLAUSIBLE_SHARE * len(text) else None


def likely_encoding(head: bytes) -> str | None:
    """Guess the encoding of a text that is not UTF-8; None for damaged UTF-8 and for what no known encoding fits."""
    num_invalid = len(head) - len(head.decode(errors="ignore").encode())
    num_high = len(head) - len(head.translate(None, _HIGH_BYTES))
    if num_invalid <= _MAX_INVALID * num_high:
        return None
    is_latin = len(_HIGH_RUN.findall(head)) > _MIN_RUNS * num_high
    fitting = [encoding for encoding in _FREQUENT if (encoding in _LATIN) == is_latin]
    evidence = {encoding: _evidence(_decode_head(head, encoding), encoding) for encoding in fitting}
    best = max(evidence, key=lambda encoding: evidence[encoding])
    return best if evidence[best] >= _MIN_EVIDENCE else None


def _evidence(text: str, encoding: str) -> float:
    """Nats per character for more frequent characters than by chance: the divergence of their share from that."""
    others = [char for char in text if char > "\x7f"]
    if not others:
        return 0.0
    by_chance = len(_FREQUENT[encoding]) / (8000 if encoding in _LARGE else 128)
    share = min(sum(char in _FREQUENT[encoding] for char in others) / len(others), 0.999)
    if share <= by_chance:
        return 0.0
    return share * math.log(share / by_chance) + (1 - share) * math.log((1 - share) / (1 - by_chance))


def _decode_head(head: bytes, encoding: str) -> str:
    """The text, whose last character may be incomplete; "" where it is not in this encoding."""
    try:
        return codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return ""
