"""Articles of a MediaWiki dump as plain text."""

import html
import re
from collections import Counter
from collections.abc import Iterator
from typing import IO
from xml.etree import ElementTree

_REDIRECT = re.compile(r"\s*#redirect", re.IGNORECASE)
_DROPPED_TAGS = re.compile(
    r"<(ref|math|gallery|timeline|syntaxhighlight|source|code|nowiki|table|imagemap|score|pre)\b[^>]*?"
    r"(?:/>|>.*?</\1\s*>)",
    re.DOTALL | re.IGNORECASE,
)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_INNERMOST_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")
_INNERMOST_TABLE = re.compile(r"\{\|(?:(?!\{\|).)*?\|\}", re.DOTALL)
_MEDIA_LINK = re.compile(
    r"\[\[\s*(?:file|image|category|datei|bild|kategorie|fichier|catégorie)\s*:[^\[\]]*(?:\[\[[^\[\]]*\]\][^\[\]]*)*\]\]",
    re.IGNORECASE,
)
_LINK = re.compile(r"\[\[(?:[^|\[\]]*\|)?([^\[\]]*)\]\]")
_EXTERNAL = re.compile(r"\[(?:https?:)?//[^\s\]]*\s*([^\]]*)\]|https?://\S+")
_EMPHASIS = re.compile(r"'{2,}")
_HEADING = re.compile(r"^=+[^=].*=+\s*$", re.MULTILINE)
_LIST_MARK = re.compile(r"^[*#:;]+\s*", re.MULTILINE)
_MAGIC = re.compile(r"__[A-Z]+__")
_EMPTY_BRACKETS = re.compile(r"\(\s*[,;]*\s*\)")
_MOST_NESTING = 12  # of templates; deeper ones are left and dropped with their line


def articles(stream: IO[bytes], counts: Counter[str]) -> Iterator[str]:
    """The wikitext of every article (namespace 0, no redirects). A dump that breaks off gives what came before."""
    try:
        for page in _pages(stream):
            text = page.get("text", "")
            if page.get("ns", "0") != "0" or _REDIRECT.match(text):
                counts["pages_that_are_no_articles"] += 1
            else:
                yield text
    except ElementTree.ParseError:
        counts["files_cut_short"] += 1


def _pages(stream: IO[bytes]) -> Iterator[dict[str, str]]:
    """Pages as {tag: text}, one in memory at a time."""
    page: dict[str, str] = {}
    root: ElementTree.Element | None = None
    for event, element in ElementTree.iterparse(stream, events=("start", "end")):
        tag = element.tag.rpartition("}")[2]
        if event == "start":
            root = element if root is None else root
        elif tag in ("ns", "text"):
            page[tag] = element.text or ""
        elif tag == "page":
            yield page
            page = {}
            assert root is not None
            root.clear()


def plain_text(wikitext: str) -> str:
    """Paragraphs of prose, one a line: templates, tables, references, media and headings are dropped, links kept."""
    text = html.unescape(_COMMENT.sub("", wikitext))
    text = _DROPPED_TAGS.sub("", text)
    for pattern in (_INNERMOST_TEMPLATE, _INNERMOST_TABLE):
        for _ in range(_MOST_NESTING):
            text, found = pattern.subn("", text)
            if not found:
                break
    text = _MEDIA_LINK.sub("", text)
    text = _LINK.sub(r"\1", text)
    text = _EXTERNAL.sub(r"\1", text)
    for pattern in (_TAG, _HEADING, _LIST_MARK, _MAGIC):
        text = pattern.sub("", text)
    text = _EMPTY_BRACKETS.sub("", _EMPHASIS.sub("", text))
    lines = (line.strip() for line in text.split("\n"))
    return "\n".join(line for line in lines if line and not line.startswith(("|", "!", "{", "}")))
