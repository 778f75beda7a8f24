"""Articles of a MediaWiki dump as plain text."""

import bz2
import time
from collections import Counter
from pathlib import Path

import pytest

from data.text.wikitext import Article, plain_text
from tests.unit.data.reading import DOCUMENTS, documents_of

WIKI = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">
<page><title>A</title><ns>0</ns><revision><text>'''The first''' sentence [[stand|stands]] here.\
&lt;ref name="x"&gt;no&lt;/ref&gt; Here is the [http://x.y second] one.{{cite|{{nested}}}}
== Heading ==
{| class="t"
| cell
|}
[[File:a.png|thumb|A [[link]] inside]]
[[Category:Things]]</text></revision></page>
<page><title>T</title><ns>10</ns><revision><text>template</text></revision></page>
<page><title>R</title><ns>0</ns><revision><text>#REDIRECT [[A]]</text></revision></page>
<page><title>B</title><ns>0</ns><revision><text>Another document begins. It ends too.</text></revision></page>
"""


def test_articles_of_a_dump(tmp_path: Path) -> None:
    path = tmp_path / "pages-articles.xml.bz2"
    path.write_bytes(bz2.compress((WIKI + "</mediawiki>").encode()))
    counts: Counter[str] = Counter()
    assert documents_of(path, counts) == DOCUMENTS
    assert counts["pages_skipped"] == 2


def test_a_truncated_dump_yields_what_came_before(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(WIKI + "<page><ti")
    counts: Counter[str] = Counter()
    assert documents_of(tmp_path / "a.xml", counts) == DOCUMENTS
    assert counts["files_cut_short"] == 1


UNCLOSED = {
    "templates": "{{" * 50_000 + "text",
    "links": "[[" * 50_000 + "text",
    "references": "<ref>a " * 50_000,
    "references with names": '<ref name="a">' * 50_000 + "<math>" * 50_000,
    "comments": "<!-- a " * 50_000,
    "tables": "{| a " * 50_000 + "|}",
    "external links": "[//a.b c " * 50_000,
    "brackets": "(" + " " * 100_000 + "x",
    "headings": "=a" + "=" * 100_000 + "x",
    "media": "[[File:a [[b]] " * 30_000,
    "tags": "<a " * 50_000,
    "a number": "&#" + "9" * 100_000 + "; text",
    "quotes": "'" * 100_001,
}


@pytest.mark.parametrize("kind", UNCLOSED)
def test_markup_left_open_takes_linear_time(kind: str) -> None:
    started = time.process_time()
    plain_text(Article(UNCLOSED[kind]))
    assert time.process_time() - started < 5, "quadratic time would be minutes"


def test_the_text_of_markup_left_open() -> None:
    assert plain_text(Article("{{" * 50_000 + "text")) == ""
    assert plain_text(Article("[[" * 50_000 + "text")).endswith("text")
    assert plain_text(Article("One <ref>two</REF > three <ref name=x /> four <ref>five")) == "One  three  four five"
    assert plain_text(Article("One <!-- two --> three <!-- four")) == "One  three"
    assert plain_text(Article("One ( ; , ) two &#65; &#99999999999;")) == "One  two A"
    assert plain_text(Article("== A ==\nThe text.\n=a= b")) == "The text.\n=a= b"


def test_a_dump_s_own_namespaces_and_redirects(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(
        '<mediawiki><siteinfo><namespaces><namespace key="0" /><namespace key="6">Mynd</namespace>'
        '<namespace key="14">Flokkur</namespace></namespaces></siteinfo>'
        "<page><ns>0</ns><revision><text>The text is here.\n[[Mynd:a.png|thumb|[[no]] text]]\n[[flokkur:Things]]\n"
        "[[Kategorie:Dinge]][[Файл:a.png]] It [[Mynd|ends]] here.</text></revision></page>"
        '<page><ns>0</ns><redirect title="A" /><revision><text>Weiterleitung.</text></revision></page></mediawiki>'
    )
    counts: Counter[str] = Counter()
    assert documents_of(tmp_path / "a.xml", counts) == [["The text is here.", "It ends here."]]
    assert counts["pages_skipped"] == 1
