"""The learning benchmark: a real run on tiny data, and its summary."""

import json
from itertools import count
from pathlib import Path

import pytest

from benchmarks import learning
from benchmarks.learning import Point, summarize
from common.errors import UserError
from evaluation.finetuning.models import ModelFolder
from evaluation.pseudo_likelihood.minimal_pairs import score_pairs
from evaluation.tasks.task import TASK_FOLDER, load_task
from evaluation.zero_shot import make_scorer
from tests.support import write_two_lengths


def test_a_run_learns_and_ends_with_the_documented_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_two_lengths(tmp_path)
    pairs = [{"sentence_good": "word3 word4 word5", "sentence_bad": "word3 word9 word5"}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs * 3))
    monkeypatch.setattr(learning, "clock", count().__next__)  # a second per step
    words = ["--seconds", "50", "--data", str(tmp_path / "data"), "--tokenizer", str(tmp_path / "vocab.txt")]
    words += ["--turns", "2", "--save", str(tmp_path / "saved"), "--recipes", "laptop", "--rates", "1e-3"]
    words += ["--blimp", str(tmp_path), "--blimp_pairs", "2"]
    assert learning.main(words) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + 2 * 2
    result = json.loads(last)
    assert {"ours_loss", "transformers_loss", "ours_blimp", "transformers_blimp", "speedup"} <= result.keys()
    # Word vectors from the data, which only the recipe has, take one second of this clock.
    assert result["steps"] == {"laptop": 47, "transformers 0.001": 48}
    # Tokens follow from those before them: better than the 4.03 nats of a guess among 56 words.
    assert result["ours_loss"] < 3.5
    for name, kind in (("laptop", "modernbert"), ("transformers_0.001", "bert")):
        folder = ModelFolder(name, tmp_path / "saved" / name)
        scorer, _ = make_scorer(folder, load_task(TASK_FOLDER / "blimp.json"), "stock", untrained=False, seed=0)
        key = "ours_blimp" if name == "laptop" else "transformers_blimp"
        scored = score_pairs(scorer, folder.tokenizer, [tuple(pair.values()) for pair in pairs])
        assert folder.config.model_type == kind
        assert scored.accuracy == pytest.approx(result[key], abs=1e-4)


def learner(name: str, *losses: float) -> learning.Learner:
    points = [Point(10.0 * (turn + 1), loss, 0.1, 0.5) for turn, loss in enumerate(losses)]
    return learning.Learner(name, *[None] * 9, points=points)  # type: ignore[arg-type]


def test_the_speedup_is_the_time_to_the_final_loss_of_the_best_baseline() -> None:
    ours = [learner("good", 6.0, 5.0, 4.5), learner("better", 5.8, 4.9, 4.4)]
    result = summarize(ours, [learner("a", 7.0, 6.5, 6.0), learner("b", 6.9, 6.2, 5.0)], 30.0)
    assert (result["ours"], result["ours_loss"], result["transformers_loss"]) == ("better", 4.4, 5.0)
    assert result["speedup"] == 1.5
    assert summarize(ours, [learner("a", 4.0)], 30.0)["speedup"] is None
    alone = summarize(ours, [], 30.0)
    assert (alone["ours_loss"], alone["transformers_loss"], alone["speedup"]) == (4.4, None, None)


def test_missing_data_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such folder. Run scripts/quickstart.sh first"):
        learning.main(["--data", str(tmp_path / "absent")])


def test_the_quickstart_has_the_laptop_s_model_and_rates() -> None:
    """Except for the vocabulary, so that what is measured on one text holds for both recipes."""
    laptop, quickstart = (
        [json.loads((learning.PROJECT / "configs" / name).read_text()) for name in learning.RECIPES[recipe][:2]]
        for recipe in ("laptop", "quickstart")
    )
    assert quickstart[0]["bert_model_config"] == laptop[0]["bert_model_config"] | {"vocab_size": 4096}
    assert quickstart[1] == laptop[1]
    sections = [next(iter(described["mixed_seq_training"].values())) for described in (laptop[0], quickstart[0])]
    for key in ("learning_rate", "warmup_proportion", "decay_proportion"):
        assert sections[0][key] == sections[1][key]
