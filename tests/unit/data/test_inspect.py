"""The report on good and on bad data."""

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from common.errors import UserError
from data import inspect
from data.shards.report import Preparation, render, text_tokens
from data.shards.schema import Rows
from data.special_tokens import SPECIALS
from data.tokenizer import BertTokenizer, load_tokenizer
from tests.unit.data.shards_on_disk import CLS, SEP, UNK, make_rows, write_nvidias, write_shard


def test_inspect_describes_nvidia_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = make_rows(400)
    write_nvidias(tmp_path / "training_0.hdf5", rows)
    assert inspect.main([str(tmp_path), "--report_dir", str(tmp_path / "report")]) == 0
    printed = capsys.readouterr()
    assert "400 in 1 file" in printed.out
    assert "only 400 rows" in printed.err
    report = json.loads((tmp_path / "report" / "report.json").read_text())["splits"][0]
    assert report["fill"] == pytest.approx(rows.input_mask.mean(), rel=1e-6)
    assert sum(report["lengths"]) == 400
    chart = ElementTree.fromstring((tmp_path / "report" / "lengths.svg").read_text())
    (curve,) = chart.findall("{*}path")
    heights = [float(step.split("V")[1].split("H")[0]) for step in curve.attrib["d"].split()[1:]]
    assert len(heights) == len(report["lengths"])
    assert np.argmin(heights) == np.argmax(report["lengths"]), "the most frequent length is the highest step"
    assert "training" in [text.text for text in chart.findall("{*}text")]
    assert (tmp_path / "report" / "report.md").read_text().startswith(f"# {tmp_path}")


def test_inspect_warns_about_duplicates_and_labels(tmp_path: Path) -> None:
    rows = make_rows(10)
    repeated = rows.take(np.tile(np.arange(10), 20)).replace(next_sentence_labels=np.zeros(200, dtype=np.int8))
    write_nvidias(tmp_path / "training_0.hdf5", repeated)
    (found,) = inspect.inspect_folder(tmp_path, None)
    assert any("repeat" in warning and "--near_duplicates 0.8" in warning for warning in found.warnings)
    assert any("labelled 1" in warning for warning in found.warnings)
    made = Preparation(str(tmp_path), files=1, rows=200, copies=20, has_trained=True)
    (found,) = inspect.inspect_folder(tmp_path, None, preparation={"training": made})
    assert not any("repeat" in warning or "--dupe_factor" in warning for warning in found.warnings)
    (found,) = inspect.inspect_folder(tmp_path, None, preparation={"training": made._replace(copies=19)})
    assert any("repeat" in warning and "Pass --near_duplicates 0.8" in warning for warning in found.warnings)


def test_the_report_shows_rows_as_text_with_marked_predictions(tmp_path: Path) -> None:
    rows = make_rows(3)
    names = [*SPECIALS, *(f"word{number}" for number in range(5, 4000)), *(f"##{n}" for n in range(4000, 5000))]
    (tmp_path / "vocab.txt").write_text("\n".join(names) + "\n")
    rows.input_ids[0, rows.masked_lm_positions[0, 0]] = 77  # a prediction replaced by a random token
    rows.input_ids[0, rows.masked_lm_positions[0, 1]] = rows.masked_lm_ids[0, 1] = 4500  # and one left unchanged
    write_nvidias(tmp_path / "training_0.hdf5", rows)
    words = ["--report_dir", str(tmp_path / "report"), "--vocab_file", str(tmp_path / "vocab.txt")]
    assert inspect.main([str(tmp_path), *words]) == 0
    shown = json.loads((tmp_path / "report" / "report.json").read_text())["splits"][0]["instances"]
    assert len(shown) == 3
    for number, text in enumerate(shown):
        predictions = dict(zip(rows.masked_lm_positions[number], rows.masked_lm_ids[number], strict=True))
        expected = [
            f"⟨{names[token]}←{names[predictions[position]]}⟩" if predictions.get(position) else names[token]
            for position, token in enumerate(rows.input_ids[number][: rows.input_mask[number].sum()])
        ]
        label = "B is random or swapped" if rows.next_sentence_labels[number] else "B follows A"
        assert text == f"({label}) {' '.join(expected).replace(' ##', '')}"
        assert f"> {text}" in (tmp_path / "report" / "report.md").read_text()
    assert shown[0].count("←") == 3
    assert "⟨word77←" in shown[0]
    assert "⟨##4500←##4500⟩" in shown[0]


def warnings_of(folder: Path, rows: Rows, tokenizer: BertTokenizer | None = None, **attributes: object) -> str:
    write_shard(folder / "training_0.hdf5", rows, attributes)
    (found,) = inspect.inspect_folder(folder, tokenizer)
    return "\n".join(found.warnings)


def test_every_warning(tmp_path: Path) -> None:
    """Each from data with one flaw."""
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIALS, *(f"word{number}" for number in range(4995))]) + "\n")
    tokenizer = load_tokenizer(tmp_path / "vocab.txt")
    good = make_rows(400)
    found = warnings_of(tmp_path / "good", good, tokenizer, tokenizer_digest=tokenizer.digest)
    assert found.count("\n") == 0
    assert "only 400 rows to train on" in found
    assert "made with another tokenizer" in warnings_of(tmp_path / "other", good, tokenizer, tokenizer_digest="0" * 64)
    unknown = good.replace(input_ids=np.where(good.input_ids % 7 == 0, UNK, good.input_ids).astype(np.int32))
    assert "of tokens are unknown" in warnings_of(tmp_path / "unknown", unknown, tokenizer)
    short = make_rows(400, width=100)
    keep = np.arange(100) < 24
    short = short.replace(
        input_mask=(short.input_mask * keep).astype(np.int8),
        segment_ids=(short.segment_ids * keep).astype(np.int8),
        masked_lm_positions=np.zeros_like(short.masked_lm_positions),
    )
    found = warnings_of(tmp_path / "short", short)
    assert "rows are filled to 2" in found
    assert "0.0% of tokens are masked" in found
    lone = good.replace(next_sentence_labels=np.ones(400, dtype=np.int8))
    assert "100% of pairs are labelled 1" in warnings_of(tmp_path / "lone", lone)
    alone = warnings_of(tmp_path / "alone", lone.take(np.arange(1)))
    assert "only 1 row to train on" in alone
    assert "labelled 1" not in alone  # by chance
    table = good.replace(input_ids=np.where(good.input_ids % 3 == 0, 77, good.input_ids).astype(np.int32))
    assert "'#77' is 26%" in warnings_of(tmp_path / "table", table)
    few = make_rows(10_000).replace(masked_lm_ids=np.zeros((10_000, 4), np.int32) + 9)
    few = few.replace(input_ids=(few.input_ids % 700 + (few.input_ids >= 700) * 5).astype(np.int32))
    assert "of 5,000 tokens ever appear" in warnings_of(tmp_path / "few", few, tokenizer)


def test_inspect_refuses_a_folder_without_shards(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        inspect.main([str(tmp_path / "absent")])
    with pytest.raises(UserError, match=r"no \.hdf5 file"):
        inspect.main([str(tmp_path)])


def test_text_tokens_exclude_special_tokens_and_padding() -> None:
    rows = make_rows(50)
    tokens = text_tokens(rows)
    assert len(tokens) == rows.input_mask.sum() - 3 * 50
    assert not np.isin(tokens, [0, CLS, SEP]).any()


def test_numbers_have_the_same_format(tmp_path: Path) -> None:
    write_nvidias(tmp_path / "training_0.hdf5", make_rows(1200))
    page = render(inspect.inspect_folder(tmp_path, None), {"documents": 12345, "seconds": 1234.5})
    assert "| documents | 12,345 |" in page
    assert "| seconds | 1,234.5 |" in page
    assert "| rows | 1,200 in 1 file |" in page
