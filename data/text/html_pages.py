"""The prose of an HTML page, without markup, scripts and navigation."""

import codecs
import re
from html.parser import HTMLParser

from data.text.encodings import likely_encoding

# Elements without prose, and the navigation around it.
_DROPPED = frozenset(
    "script style noscript template svg math head nav footer aside form button select textarea iframe object".split()
)
_INLINE = frozenset(
    "a abbr b bdi bdo cite code data dfn em font i kbd mark q rp rt ruby s samp small span strong sub sup time u var "
    "wbr ins del big tt script style svg path math img input label".split()
)
_CHARSET = re.compile(rb"<meta[^<>]{0,200}?charset\s*=\s*[\"']?\s*([A-Za-z0-9_.:-]+)", re.IGNORECASE)
_BEGINNING = re.compile(
    r"\s*(?:<\?xml[^<>]*>\s*)?(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html)\b", re.IGNORECASE | re.DOTALL
)
_SAMPLE_BYTES = 2**16
_HEAD_BYTES = 4096  # of a page, in which its character set must be declared


def is_html(sample: str) -> bool:
    return bool(_BEGINNING.match(sample))


def html_text(content: bytes) -> str:
    """Return the prose, one paragraph per line."""
    page = _Page()
    page.feed(content.decode(_charset(content), errors="ignore"))
    page.close()
    lines = (" ".join(line.split()) for line in "".join(page.parts).split("\n"))
    return "\n".join(line for line in lines if line)


def _charset(content: bytes) -> str:
    """The declared character set, else UTF-8, or what it is likely to be if it is not that."""
    declared = _CHARSET.search(content[:_HEAD_BYTES])
    try:
        if declared:
            return codecs.lookup(declared[1].decode()).name
    except LookupError:
        pass
    return likely_encoding(content[:_SAMPLE_BYTES]) or "utf-8"


class _Page(HTMLParser):
    """Collects the text. A line break stands where a block begins or ends; those of the source are spaces."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._dropped: list[str] = []  # open elements without prose

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _DROPPED:
            self._dropped.append(tag)
        elif tag == "body":
            self._dropped.clear()  # a head that was not closed
        if tag not in _INLINE:
            self.parts.append("\n")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _INLINE:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._dropped:
            del self._dropped[self._dropped.index(tag) :]
        if tag not in _INLINE:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self._dropped:
            self.parts.append(data.replace("\n", " "))
