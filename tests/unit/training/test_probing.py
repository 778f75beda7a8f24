"""--probe, --keep_best_by and --stop_after_no_gain in tiny runs inside this process."""

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common.errors import UserError
from deepspeed_train import main
from tests.support import add_probes, read_metrics, write_project
from tests.unit.training.in_process import own_environment, run_here
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.state import read_state
from training.export.hugging_face import export_checkpoint

KEEP = ["--validate_every_steps", "2", "--keep_best_by", "probe/order"]


def figures(folder: Path) -> list[tuple[Any, ...]]:
    return [(row["step"], row["order"], row["rows"]) for row in read_metrics(folder, "probe")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run_here([*write_project(folder), *add_probes(folder), *KEEP, "--max_steps", "6"])
    return folder


def test_figures_are_written_and_the_best_is_kept(whole: Path) -> None:
    before, *found = figures(whole)
    assert before[0] == 0, "the model before training, which is never the best"
    assert [step for step, *_ in found] == [2, 4, 6]
    assert all(0 < order <= 1 and 0 <= rows <= 1 for _, order, rows in found)
    best = max(order for _, order, _ in found)
    first = next(step for step, order, _ in found if order == best)
    folder = whole / "out" / "saved_models" / "tiny"
    content = json.loads((folder / "best.json").read_text())
    assert content == {
        "tag": f"step_{first:08}", "is_only_best": first != 6, "probe": "probe/order", "value": best,
    }  # fmt: skip
    state = read_state(folder / CheckpointFolder(folder).choose(None))
    assert (state.best_probe, state.best_by, state.best_tag) == (best, "probe/order", content["tag"])
    metrics = whole / "out" / "runs" / "tiny" / "metrics.jsonl"
    export_checkpoint(folder / content["tag"], whole / "hf", None, metrics)
    card = (whole / "hf" / "README.md").read_text()
    assert f"| order | {100 * before[1]:.1f} | {100 * best:.1f} |" in card
    assert state.probe_units == {"order": 32, "rows": 9}
    assert sum(row["seconds_probe"] for row in read_metrics(whole, "train")) > 0
    events = EventAccumulator(str(whole / "out" / "runs" / "tiny")).Reload()
    assert [event.value for event in events.Scalars("probe/order")] == pytest.approx(
        [order for _, order, _ in figures(whole)]
    )


def test_a_resumed_run_has_the_same_figures(whole: Path, tmp_path: Path) -> None:
    words = [*write_project(tmp_path), *add_probes(tmp_path), *KEEP]
    run_here([*words, "--max_steps", "3"])
    run_here([*words, "--max_steps", "6"])
    assert [step for step, *_ in figures(tmp_path)] == [0, 2, 3, 4, 6]
    assert [row for row in figures(tmp_path) if row[0] != 3] == figures(whole)


def test_a_run_without_gain_ends_and_stays_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*write_project(tmp_path), *add_probes(tmp_path), "--learning_rate", "1e-30", "--stop_after_no_gain", "2"]
    words += ["--probe_every_steps", "3", "--print_steps", "5"]
    run_here(words)
    assert "ended at step 9 (--stop_after_no_gain 2): probe/order has not improved for 2 measurements" in (
        capsys.readouterr().out
    )
    folder = tmp_path / "out" / "saved_models" / "tiny"
    assert read_state(folder / CheckpointFolder(folder).choose(None)).step == 9
    assert [row["step"] for row in read_metrics(tmp_path, "train")] == [5, 9]
    assert len(read_metrics(tmp_path, "end")) == 1
    run_here(words)
    assert "finished already, at step 9" in capsys.readouterr().out


def test_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    words = [*write_project(tmp_path), *add_probes(tmp_path)]
    (tmp_path / "rows.csv").write_text("text,stars\na,1\n")
    wrong = [*words, "--keep_best_by", "probe/oder", "--stop_after_no_gain", "3"]
    with own_environment(), pytest.raises(UserError) as error:
        main(wrong)
    for part in (
        "--keep_best_by probe/oder: is not a figure of --probe; did you mean 'probe/order'?",
        "rows.csv: has no column 'label'",
        "--stop_after_no_gain 3: without --validate_every_steps or --probe_every_steps",
    ):
        assert part in str(error.value)
    with own_environment(), pytest.raises(UserError, match="--keep_best_by probe/x: there is no probe"):
        main([*words[: words.index("--probe")], "--keep_best_by", "probe/x"])
    with own_environment(), pytest.raises(UserError, match="--probe blimpp: unknown task; did you mean 'blimp'"):
        main([*words[: words.index("--probe")], "--probe", "blimpp"])
