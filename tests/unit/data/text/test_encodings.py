"""The encoding of a text that is not UTF-8 is guessed from its bytes."""

from pathlib import Path

import pytest

from common.errors import UserError
from data.preparation.pipeline import Pipeline
from data.preparation.settings import Settings
from data.preparation.work_folder import Job
from data.text.encodings import likely_encoding
from data.text.html_pages import html_text
from data.text.sources import find_sources

TEXTS = {
    "windows-1252": [
        "Le café était fermé à l'arrivée des élèves, déjà très fatigués.",
        "Die Straße führt über München. Dort wohnt Dr. Müller, der gern Käse ißt.",
        "A situação não é tão fácil, mas amanhã haverá uma solução.",
        "\u201cIt\u2019s fine,\u201d she said \u2014 and he didn\u2019t answer.",
    ],
    "windows-1250": [
        "Wczoraj poszedłem do sklepu i kupiłem świeży chleb, ponieważ byłem głodny.",
        "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    ],
    "windows-1251": ["Сегодня хорошая погода. Мы гуляем в парке.", "Ми гуляємо в парку і говоримо про книги."],
    "koi8-r": ["Сегодня хорошая погода. Мы гуляем в парке и говорим о книгах."],
    "windows-1253": ["Σήμερα ο καιρός είναι ωραίος και πηγαίνουμε βόλτα στο πάρκο."],
    "windows-1255": ["מזג האוויר יפה היום. אנחנו הולכים בפארק."],
    "windows-1256": ["الطقس جميل اليوم. نحن نمشي في الحديقة. هل تحب القاهرة؟"],
    "tis-620": ["วันนี้อากาศดี เราไปเดินเล่นในสวน"],
    "shift_jis": ["今日は天気がいいです。私たちは公園を散歩します。"],
    "euc-jp": ["今日は天気がいいです。私たちは公園を散歩します。"],
    "euc-kr": ["오늘은 날씨가 좋습니다. 우리는 공원에서 산책합니다."],
    "gb18030": ["今天天气很好。我们去公园散步。这是一个很大的城市，有很多人。"],
    "big5": ["今天天氣很好。我們去公園散步。這是一個很大的城市，有很多人。"],
}


@pytest.mark.parametrize(("encoding", "text"), [(name, text) for name, texts in TEXTS.items() for text in texts])
def test_the_encoding_is_guessed_and_a_page_is_read_in_it(encoding: str, text: str) -> None:
    assert likely_encoding(text.encode(encoding)) == encoding
    page = f"<!DOCTYPE html><html><body><div class='a'><p>{text}</p><p>Plain words in English, too.</p></body></html>"
    assert html_text(page.encode(encoding)).startswith(text)


@pytest.mark.parametrize(
    "content",
    ["déjà vu, là-bas".encode() + b" one bad \xff byte", bytes(range(256)) * 20, b"plain", b"", "今日は".encode()[:-1]],
)
def test_nothing_is_guessed_of_utf8_and_of_junk(content: bytes) -> None:
    assert likely_encoding(content) is None


def read(root: Path, name: str) -> Pipeline:
    pipeline = Pipeline(Job(Settings((32,), (5,)), str(root / "work"), "", str(root / "tokenizer")), None, 1)
    pipeline.read(find_sources([str(root / name)]))
    return pipeline


@pytest.mark.parametrize("name", ["a.txt", "a.json", "a.csv"])
def test_the_report_and_a_warning_name_the_encoding(tmp_path: Path, name: str) -> None:
    text = TEXTS["windows-1252"][0]
    before, after = {"a.txt": ("", ""), "a.json": ('[{"text": "', '"}]'), "a.csv": ("text\n", "")}[name]
    (tmp_path / name).write_bytes(f"{before}{text}{after}\n".encode("latin-1"))
    files = read(tmp_path, name).files
    assert files.describe()[0]["read_as"].endswith(", but it is not UTF-8 (windows-1252?)")
    assert files.describe_encodings().startswith(f"{tmp_path / name}: not UTF-8 but probably windows-1252; ")
    assert "`iconv -f windows-1252 -t utf-8 OLD > NEW`" in files.describe_encodings()


def test_a_file_without_a_line_of_ascii_is_refused_with_its_encoding(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\n".join(TEXTS["koi8-r"] * 20).encode("koi8-r"))
    pipeline = Pipeline(Job(Settings((32,), (5,)), str(tmp_path / "work"), "", ""), None, 1)
    with pytest.raises(
        UserError, match=r"no document of usable text was found; .*a\.txt: not UTF-8 but probably koi8-r"
    ):
        pipeline.run(find_sources([str(tmp_path / "a.txt")]), None, ["a.txt"])
