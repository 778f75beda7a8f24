"""Runs plotted as PNG and HTML."""

import json
import re
from pathlib import Path

import pytest

from common.errors import UserError
from scripts.plot_run import main


def write_run(folder: Path, loss: float) -> Path:
    folder.mkdir(parents=True)
    rows = [
        {
            "kind": "train",
            "step": step,
            "samples": 8 * step,
            "tokens": 99 * step,
            "mlm_loss": loss / step,
            "grad_norm": "nan",
        }
        for step in range(1, 6)
    ]
    rows.append({"kind": "validation", "step": 5, "samples": 40, "mlm_loss": 1.2345, "mlm_accuracy": 0.5})
    lines = [json.dumps(row) for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "trai')  # the last line of a killed run
    return folder


def test_png_and_html_of_several_runs(tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / part / "runs" / "tiny", loss)) for part, loss in (("a", 4.0), ("b<c", 3.0))]
    main([*runs, "--output", str(tmp_path / "out" / "loss.png")])
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    main([*runs, "--output", str(tmp_path / "loss.html"), "--over", "samples"])
    page = (tmp_path / "loss.html").read_text()
    assert page.count("<svg") == 1
    assert "1.234" in page
    assert "b&lt;c" in page
    assert "<script" not in page


def test_the_table_separates_training_and_validation(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 4.0)
    main([str(run), "--output", str(tmp_path / "loss.html")])
    table = (tmp_path / "loss.html").read_text().split("</table>")[0]
    cells = re.findall(r"<td>([^<]*)</td>", table)
    assert cells == ["run", "5", "40", "495", "0.8", "", "", "", "5", "1.234", "", "0.5", ""]
    assert "last train line" in table
    assert "last validation line" in table


def test_mistakes(tmp_path: Path) -> None:
    run = str(write_run(tmp_path / "run", 4.0))
    with pytest.raises(UserError, match="expected a name that ends"):
        main([run, "--output", str(tmp_path / "loss.gif")])
    with pytest.raises(UserError, match="no such file"):
        main([str(tmp_path / "nowhere"), "--output", str(tmp_path / "loss.png")])
