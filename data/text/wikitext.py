"""Articles of a MediaWiki dump as plain text.

Wikitext is written by anybody, so every step takes time in proportion to its length, whatever is left open in it.
"""

import html
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import IO, NamedTuple
from xml.etree import ElementTree

_REDIRECT = re.compile(r"\s*#redirect", re.IGNORECASE)
_DROPPED_TAG = re.compile(
    r"<(ref|math|gallery|timeline|syntaxhighlight|source|code|nowiki|table|imagemap|score|pre)\b[^<>]*>", re.IGNORECASE
)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_INNERMOST_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")
_INNERMOST_TABLE = re.compile(r"\{\|(?:(?!\{\|).)*?\|\}", re.DOTALL)
_LINK = re.compile(r"\[\[(?:[^|\[\]]*\|)?([^\[\]]*)\]\]")
_EXTERNAL = re.compile(r"\[(?:https?:)?//[^\s\[\]]*[ \t]*([^\[\]\n]*)\]|https?://\S+")
_EMPHASIS = re.compile(r"'{2,}")
_LIST_MARK = re.compile(r"^[*#:;]+\s*", re.MULTILINE)
_MAGIC = re.compile(r"__[A-Z]+__")
_EMPTY_BRACKETS = re.compile(r"\([\s,;]*\)")
_LONG_NUMBER = re.compile(r"&#[xX]?[0-9a-fA-F]{9,};?")  # of a character that does not exist
_MAX_NESTING = 12  # of templates; deeper ones are left and dropped with their line

# Namespaces whose links are no text: media files and categories. A dump names its own in its <siteinfo>; these are the
# common ones, and the English names, which every wiki understands.
_MEDIA_KEYS = ("6", "14", "-2")
_MEDIA_NAMES = """
    file image media category datei bild kategorie fichier catégorie archivo imagen categoría ficheiro arquivo imagem
    categoria immagine bestand afbeelding categorie plik grafika kategoria soubor súbor fájl kép kategória fil kategori
    файл изображение категория категорія зображення αρχείο κατηγορία ファイル 画像 カテゴリ
    文件 檔案 图像 圖像 分类 分類 파일 그림 분류 ملف تصنيف پرونده رده קובץ תמונה קטגוריה चित्र श्रेणी ไฟล์ ภาพ หมวดหมู่
    tập_tin thể_loại dosya tiedosto luokka berkas
""".split()


class Article(NamedTuple):
    text: str  # wikitext
    media: tuple[str, ...] = ()  # names of namespaces whose links are no text, as the dump tells them


def articles(stream: IO[bytes], counts: Counter[str]) -> Iterator[Article]:
    """Every article (namespace 0, no redirects). A dump that breaks off gives what came before."""
    media: tuple[str, ...] = ()
    try:
        for page in _pages(stream):
            if "namespaces" in page:
                media = tuple(name for name in page["namespaces"].split("\n") if name)
                continue
            text = page.get("text", "")
            if page.get("ns", "0") != "0" or "redirect" in page or _REDIRECT.match(text):
                counts["pages_that_are_no_articles"] += 1
            else:
                yield Article(text, media)
    except ElementTree.ParseError:
        counts["files_cut_short"] += 1


def _pages(stream: IO[bytes]) -> Iterator[dict[str, str]]:
    """Pages as {tag: text}, one in memory at a time; the names of the media namespaces first, where they are told."""
    page: dict[str, str] = {}
    names: list[str] = []
    root: ElementTree.Element | None = None
    for event, element in ElementTree.iterparse(stream, events=("start", "end")):
        tag = element.tag.rpartition("}")[2]
        if event == "start":
            root = element if root is None else root
        elif tag == "namespace" and element.get("key") in _MEDIA_KEYS:
            names.append(element.text or "")
        elif tag == "siteinfo":
            yield {"namespaces": "\n".join(names)}
        elif tag in ("ns", "text", "redirect"):
            page[tag] = element.text or ""
        elif tag == "page":
            yield page
            page = {}
            assert root is not None
            root.clear()


def plain_text(article: Article) -> str:
    """Paragraphs of prose, one a line: templates, tables, references, media and headings are dropped, links kept."""
    text = html.unescape(_LONG_NUMBER.sub("", _without_comments(article.text)))
    text = _without_dropped_tags(text)
    for pattern in (_INNERMOST_TEMPLATE, _INNERMOST_TABLE):
        for _ in range(_MAX_NESTING):
            text, found = pattern.subn("", text)
            if not found:
                break
    text = _without_media(text, article.media)
    text = _LINK.sub(r"\1", text)
    text = _EXTERNAL.sub(r"\1", text)
    for pattern in (_TAG, _LIST_MARK, _MAGIC):
        text = pattern.sub("", text)
    text = _EMPTY_BRACKETS.sub("", _EMPHASIS.sub("", text))
    lines = (line.strip() for line in text.split("\n"))
    return "\n".join(line for line in lines if line and not _is_markup(line))


def _is_markup(line: str) -> bool:
    """A heading, or what is left of a table or template."""
    return line.startswith(("|", "!", "{", "}")) or (line.startswith("=") and line.endswith("="))


def _without_comments(text: str) -> str:
    """A comment that is not closed hides the rest, as it does on the wiki."""
    kept: list[str] = []
    position = 0
    while (start := text.find("<!--", position)) >= 0:
        kept.append(text[position:start])
        end = text.find("-->", start + 4)
        position = len(text) if end < 0 else end + 3
    return "".join([*kept, text[position:]])


def _without_dropped_tags(text: str) -> str:
    """Without elements that hold no prose. One that is never closed loses its tag only."""
    kept: list[str] = []
    position = 0
    unclosed: set[str] = set()  # names after which no closing tag comes any more: asked once for each
    for opening in _DROPPED_TAG.finditer(text):
        if opening.start() < position:
            continue
        kept.append(text[position : opening.start()])
        position = opening.end()
        name = opening[1].lower()
        if not opening[0].endswith("/>") and name not in unclosed:
            closing = _closing_tag(name).search(text, position)
            if closing is None:
                unclosed.add(name)
            else:
                position = closing.end()
    return "".join([*kept, text[position:]])


def _closing_tag(name: str) -> re.Pattern[str]:
    return re.compile(rf"</{name}\s*>", re.IGNORECASE)


def _without_media(text: str, names: tuple[str, ...]) -> str:
    """Without links to files and categories, which may hold one more level of links in their captions."""
    return _media_link(names).sub("", text)


@lru_cache(maxsize=8)
def _media_link(names: tuple[str, ...]) -> re.Pattern[str]:
    known = dict.fromkeys(name.replace(" ", "_") for name in (*_MEDIA_NAMES, *names))
    listed = "|".join(re.escape(name).replace("_", "[ _]") for name in known)
    return re.compile(
        rf"\[\[[ \t]*(?:{listed})[ \t]*:[^\[\]]*(?:\[\[[^\[\]]*\]\][^\[\]]*)*\]\]",
        re.IGNORECASE,
    )
