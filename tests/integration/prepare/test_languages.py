"""The examples of docs/data.md, "Languages": each runs with its flags and gives what the table says."""

import json
from pathlib import Path

import pytest

from data import prepare
from data.tokenizer import load_tokenizer
from data.tokenizer_training import train_tokenizer
from tests.integration.prepare.corpora import ROOT


def examples() -> dict[str, list[str]]:
    """Language → flags, text, number of sentences, words of the first."""
    section = (ROOT / "docs" / "data.md").read_text().split("## Languages\n")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.split("\n") if line.startswith("| ")
    ]
    return {row[0]: row[1:] for row in rows[1:]}


@pytest.mark.parametrize("language", examples())
def test_an_example_of_the_languages_page(language: str, tmp_path: Path) -> None:
    flags, text, sentences, words = examples()[language]
    (tmp_path / "a.txt").write_text(text + "\n", encoding="utf-8")
    arguments = ["--input", str(tmp_path / "a.txt"), "--output_dir", str(tmp_path / "out"), "--vocab_size", "300",
                 "--max_seq_length", "64", "--objective", "mlm", "--dupe_factor", "1", "--workers", "1",
                 "--validation_share", "0", *flags.strip("`").split()]  # fmt: skip
    assert prepare.main(arguments) == 0
    report = json.loads((tmp_path / "out" / "64" / "report.json").read_text())
    assert report["preparation"]["sentences"] == int(sentences)
    assert report["preparation"].get("unknown_tokens", 0) == 0
    backend = load_tokenizer(tmp_path / "out" / "tokenizer").backend
    normal = backend.normalizer.normalize_str(text)
    found = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(normal)]
    assert found[: len(words.split())] == words.split()
    tokens = backend.encode(text).tokens
    assert "".join(token.removeprefix("##") for token in tokens[1:-1]) == "".join(found)


def test_lower_casing_does_what_the_page_says() -> None:
    normalizer = train_tokenizer(["a few words"], 100).backend.normalizer
    assert [normalizer.normalize_str(word) for word in ("führt", "が", "है", "ดี")] == ["fuhrt", "か", "ह", "ด"]
    assert len(normalizer.normalize_str("한")) == 3
