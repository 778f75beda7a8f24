"""Two real gloo ranks under the real launcher give the losses that one rank gives, at every ZeRO stage."""

from pathlib import Path

import pytest

from tests.support import read_metrics, run_deepspeed, run_plain, write_project

NUM_STEPS = 6
# fp32 sums in another order: measured differences are below 2e-6 over these steps.
TOLERANCE = 2e-5


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder, "train")]


def without_dropout(folder: Path) -> None:
    """Dropout differs from rank to rank by design, so the comparison goes without."""
    path = folder / "model.json"
    path.write_text(
        path.read_text().replace(
            '"hidden_size"', '"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "hidden_size"'
        )
    )


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    words = write_project(folder)
    without_dropout(folder)
    outcome = run_plain([*words, "--max_steps", str(NUM_STEPS)])
    assert outcome.returncode == 0, outcome.stderr
    return folder


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_train_as_one_does(stage: int, one_rank: Path, tmp_path: Path) -> None:
    words = write_project(tmp_path, zero_optimization={"stage": stage})
    without_dropout(tmp_path)
    outcome = run_deepspeed([*words, "--max_steps", str(NUM_STEPS)], num_ranks=2)
    assert outcome.returncode == 0, outcome.stderr
    assert losses(tmp_path) == pytest.approx(losses(one_rank), abs=TOLERANCE)
    assert len(losses(tmp_path)) == NUM_STEPS
    ours, theirs = (read_metrics(folder, "validation")[-1] for folder in (tmp_path, one_rank))
    assert ours["mlm_loss"] == pytest.approx(theirs["mlm_loss"], abs=TOLERANCE)
    assert ours["nsp_accuracy"] == theirs["nsp_accuracy"]


def test_accumulation_gives_the_same_losses(one_rank: Path, tmp_path: Path) -> None:
    words = write_project(tmp_path, train_micro_batch_size_per_gpu=2)
    without_dropout(tmp_path)
    outcome = run_plain([*words, "--max_steps", str(NUM_STEPS)])
    assert outcome.returncode == 0, outcome.stderr
    assert losses(tmp_path) == pytest.approx(losses(one_rank), abs=TOLERANCE)
