"""Words in scripts with and without spaces, and what depends on them."""

from pathlib import Path

import pytest

from data.preparation.duplicates import sign
from data.preparation.reading import read_sources
from data.preparation.settings import Settings
from data.preparation.work_folder import Job
from data.text.sentences import has_words, split_words
from data.text.sources import Source

SHORT = ["机器学习很有趣。", "機械学習は面白いです。", "การเรียนรู้ของเครื่องน่าสนใจ", "ការរៀនម៉ាស៊ីន"]


def test_a_character_is_a_word_in_a_script_without_spaces() -> None:
    assert split_words("BERT 是 一个model") == ["BERT", "是", "一", "个", "model"]
    assert split_words("한국어 문장입니다 Привет, мир") == ["한국어", "문장입니다", "Привет,", "мир"]
    assert has_words("one two three\n", 3)
    assert not has_words("one two\n", 3)
    assert not has_words("два слова\n", 3)


@pytest.mark.parametrize("text", SHORT)
def test_a_short_document_without_spaces_is_kept(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(f"{text}\n\nno more\n")
    job = Job(Settings((32,), (5,)), str(tmp_path / "work"), "", "")
    found = read_sources(job, 0, [Source(str(tmp_path / "a.txt"), "sentences")])
    assert found["pieces"] == [("000000-000000", 0, 1)]
    assert found["counts"]["documents_too_short"] == 1


def test_near_duplicates_are_found_in_text_without_spaces() -> None:
    text = "".join(chr(0x4E00 + (number * number * 7) % 5000) for number in range(400))
    changed = text[:200] + "啊" + text[201:]
    other = text[::-1]
    alike, unlike = ((sign(text) == sign(compared)).mean() for compared in (changed, other))
    assert alike > 0.9
    assert unlike < 0.2
