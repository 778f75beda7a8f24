"""Articles of a MediaWiki dump as plain text.

Anybody can edit wikitext, so every step takes time linear in its length, whatever markup is left open.
mwparserfromhell is 16 times slower (285 articles/s against 4,535 on one core), and quadratic in unclosed tags.
"""

import html
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import IO, NamedTuple
from xml.etree import ElementTree

from data.text.files import DAMAGED

_REDIRECT = re.compile(r"\s*#redirect", re.IGNORECASE)
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)  # an unclosed comment hides the rest, as on the wiki
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
_LONG_NUMBER = re.compile(r"&#[xX]?[0-9a-fA-F]{9,};?")  # beyond any character; html.unescape would parse it
_MAX_NESTING = 12  # of templates; what is left of deeper ones is dropped with its line

# Namespaces whose links are not text: media files and categories. A dump lists its own names in <siteinfo>; these are
# common ones, and the English names, which every wiki accepts.
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
    media: tuple[str, ...] = ()  # the dump's own names of the namespaces whose links are not text


def read_articles(stream: IO[bytes], counts: Counter[str]) -> Iterator[Article]:
    """Yield every article (namespace 0, no redirects), one in memory at a time; of a truncated dump, those before."""
    media: list[str] = []
    page: dict[str, str] = {}
    root: ElementTree.Element | None = None
    try:
        for event, element in ElementTree.iterparse(stream, events=("start", "end")):
            root = element if root is None else root
            if event == "start":
                continue
            tag = element.tag.rpartition("}")[2]
            if tag == "namespace" and element.get("key") in _MEDIA_KEYS and element.text:
                media.append(element.text)
            elif tag in ("ns", "text", "redirect"):
                page[tag] = element.text or ""
            elif tag == "page":
                text = page.get("text", "")
                if page.get("ns", "0") != "0" or "redirect" in page or _REDIRECT.match(text):
                    counts["pages_skipped"] += 1
                else:
                    yield Article(text, tuple(media))
                page = {}
                root.clear()
    except ElementTree.ParseError:
        counts[DAMAGED] += 1


def plain_text(article: Article) -> str:
    """Return the prose, one paragraph per line, without templates, tables, references, media and headings."""
    text = html.unescape(_LONG_NUMBER.sub("", _COMMENT.sub("", article.text)))
    text = _without_dropped_tags(text)
    for pattern in (_INNERMOST_TEMPLATE, _INNERMOST_TABLE):
        for _ in range(_MAX_NESTING):
            text, found = pattern.subn("", text)
            if not found:
                break
    text = _media_link(article.media).sub("", text)
    text = _LINK.sub(r"\1", text)
    text = _EXTERNAL.sub(r"\1", text)
    for pattern in (_TAG, _LIST_MARK, _MAGIC):
        text = pattern.sub("", text)
    text = _EMPTY_BRACKETS.sub("", _EMPHASIS.sub("", text))
    lines = (line.strip() for line in text.split("\n"))
    return "\n".join(line for line in lines if line and not _is_markup(line))


def _is_markup(line: str) -> bool:
    """Whether the line is a heading, or a remainder of a table or template."""
    return line.startswith(("|", "!", "{", "}")) or (line.startswith("=") and line.endswith("="))


def _without_dropped_tags(text: str) -> str:
    """Remove elements that hold no prose. Of an element that is never closed, only the tag is removed."""
    kept: list[str] = []
    position = 0
    unclosed: set[str] = set()  # tags without a closing tag in the rest of the text, so that each is searched once
    for opening in _DROPPED_TAG.finditer(text):
        if opening.start() < position:
            continue
        kept.append(text[position : opening.start()])
        position = opening.end()
        name = opening[1].lower()
        if not opening[0].endswith("/>") and name not in unclosed:
            closing = re.compile(rf"</{name}\s*>", re.IGNORECASE).search(text, position)
            if closing is None:
                unclosed.add(name)
            else:
                position = closing.end()
    return "".join([*kept, text[position:]])


@lru_cache(maxsize=8)
def _media_link(names: tuple[str, ...]) -> re.Pattern[str]:
    """Match links to files and categories; their captions may contain one more level of links."""
    known = dict.fromkeys(name.replace(" ", "_") for name in (*_MEDIA_NAMES, *names))
    listed = "|".join(re.escape(name).replace("_", "[ _]") for name in known)
    return re.compile(rf"\[\[[ \t]*(?:{listed})[ \t]*:[^\[\]]*(?:\[\[[^\[\]]*\]\][^\[\]]*)*\]\]", re.IGNORECASE)
