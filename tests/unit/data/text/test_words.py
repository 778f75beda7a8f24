"""Words of scripts with and without blanks, and what depends on them."""

from collections import Counter
from pathlib import Path

import pytest

from data.preparation.duplicates import sign
from data.preparation.settings import Settings
from data.preparation.tasks import _clean_documents
from data.text.sources import Source
from data.text.words import has_words, split_words

SHORT = ["机器学习很有趣。", "機械学習は面白いです。", "การเรียนรู้ของเครื่องน่าสนใจ", "ការរៀនម៉ាស៊ីន"]


def test_a_character_is_a_word_where_there_are_no_blanks() -> None:
    assert split_words("BERT 是 一个model") == ["BERT", "是", "一", "个", "model"]
    assert split_words("한국어 문장입니다 Привет, мир") == ["한국어", "문장입니다", "Привет,", "мир"]
    assert has_words("one two three\n", 3)
    assert not has_words("one two\n", 3)
    assert not has_words("два слова\n", 3)


@pytest.mark.parametrize("text", SHORT)
def test_a_short_document_without_blanks_is_kept(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(f"{text}\n\nno more\n")
    counts: Counter[str] = Counter()
    found = list(_clean_documents(Source(str(tmp_path / "a.txt"), "sentences"), Settings((32,), (5,)), counts))
    assert len(found) == 1
    assert counts["documents_too_short"] == 1


def test_near_duplicates_are_found_in_text_without_blanks() -> None:
    pytest.importorskip("datasketch")
    text = "".join(chr(0x4E00 + (number * number * 7) % 5000) for number in range(400))
    changed = text[:200] + "啊" + text[201:]
    other = text[::-1]
    alike, unlike = ((sign(text) == sign(compared)).mean() for compared in (changed, other))
    assert alike > 0.9
    assert unlike < 0.2
