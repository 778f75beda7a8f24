"""Runs plotted as PNG and HTML."""

import json
import re
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from common.errors import UserError
from scripts.plot_run import draw, main, read_rows


def write_run(folder: Path, loss: float) -> Path:
    folder.mkdir(parents=True)
    rows = [
        {
            "kind": "train",
            "step": step,
            "samples": 8 * step,
            "tokens": 250_000 * step,
            "seconds_per_step": 7.0,
            "window_steps": 1.0,
            "seconds_checkpoint": 0.5,
            "mlm_loss": loss / step,
            "grad_norm": "nan",
        }
        for step in range(1, 6)
    ]
    rows.insert(3, {"kind": "validation", "step": 3, "samples": 24, "mlm_loss": 1.1, "mlm_accuracy": 0.5})
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


def test_the_table_is_readable(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 4.0)
    main([str(run), "--output", str(tmp_path / "loss.html")])
    table = (tmp_path / "loss.html").read_text().split("</table>")[0]
    heads, cells = (re.findall(rf"<{kind}>([^<]*)</{kind}>", table) for kind in ("th", "td"))
    assert dict(zip(heads, cells, strict=True)) == {
        "run": "run",
        "steps": "5",
        "tokens": "1.2 M",
        "hours": "0.01",
        "training loss (MLM)": "0.800",
        "validated at step": "5",
        "validation loss (MLM)": "1.234",
        "validation accuracy (MLM)": "50.0%",
        "lowest validation loss": "1.100",
        "at step": "3",
    }


def test_a_folder_of_runs(tmp_path: Path) -> None:
    for name, loss in (("first", 4.0), ("second", 3.0)):
        write_run(tmp_path / "out" / "runs" / name, loss)
    for folder in (tmp_path / "out" / "runs", tmp_path / "out"):
        main([str(folder), "--output", str(tmp_path / "loss.html")])
        page = (tmp_path / "loss.html").read_text()
        assert "<title>first, second</title>" in page


@pytest.mark.parametrize(
    ("over", "positions"), [("tokens", [250_000.0, 1_250_000.0]), ("hours", [7.5 / 3600, 37.5 / 3600])]
)
def test_curves_over_tokens_and_hours(over: str, positions: list[float], tmp_path: Path) -> None:
    rows = read_rows(write_run(tmp_path / "run", 4.0) / "metrics.jsonl")
    axes = MagicMock()
    axes.get_legend_handles_labels.return_value = ([], [])
    draw(axes, {"run": rows}, "mlm_loss", over)
    (train, validation) = (call.args[0] for call in axes.plot.call_args_list)
    assert [train[0], train[-1]] == pytest.approx(positions)
    assert validation[-1] == pytest.approx(positions[1])  # where the training line before it is
    main([str(tmp_path / "run"), "--output", str(tmp_path / "loss.html"), "--over", over])


def test_mistakes(tmp_path: Path) -> None:
    run = str(write_run(tmp_path / "run", 4.0))
    with pytest.raises(UserError, match="expected a name that ends"):
        main([run, "--output", str(tmp_path / "loss.gif")])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().replace("seconds_per_step", "other")
    (tmp_path / "run" / "metrics.jsonl").write_text(lines)
    with pytest.raises(UserError, match="the run run has no such figure"):
        main([run, "--output", str(tmp_path / "loss.png"), "--over", "hours"])
    with pytest.raises(UserError, match="no such file"):
        main([str(tmp_path / "nowhere"), "--output", str(tmp_path / "loss.png")])
