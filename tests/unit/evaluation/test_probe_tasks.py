"""Probes of tasks: fixed rows, shared work, the same figures for any number of processes."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.errors import UserError
from data.tokenizer import BertTokenizer
from evaluation.probes import MIN_UNITS, build_probe, check_kind, probe_names
from evaluation.pseudo_likelihood.likelihood import ALONE, Team, encode, mask_id_of, score_sentences
from evaluation.pseudo_likelihood.native import PackedScorer, mean_states, to_native
from evaluation.tasks.task import choose_tasks, make_task
from evaluation.tasks.task_data import load_data
from tests.unit.evaluation.tiny import NOUNS, make_model, make_tokenizer, sentence, write_pairs, write_reviews

TOKENIZER = BertTokenizer(make_tokenizer().backend_tokenizer)


@pytest.fixture(scope="module")
def model() -> Any:
    stock = make_model(make_tokenizer())
    return to_native(stock.state_dict(), stock.config.to_dict(), "here").train()


def on_every_rank(size: int, work: Any) -> list[Any]:
    """`work(team)` on `size` threads whose teams gather from each other."""
    results: list[Any] = [None] * size
    shared: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=300)

    def run(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            shared[rank] = value
            barrier.wait()
            values = list(shared)
            barrier.wait()
            return values

        results[rank] = work(Team(rank, size, gather))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_a_team_computes_what_one_process_does(model: Any, size: int) -> None:
    generator = np.random.default_rng(0)
    encoded = encode(TOKENIZER, [" ".join(sentence(generator) for _ in range(1 + i % 3)) for i in range(7)])
    rows = [item.ids for item in encoded]
    model.eval()  # once, because the threads share it

    def scores(team: Team) -> Any:
        scorer = PackedScorer(model, tokens_at_once=200, team=team, head_rows=None)
        return score_sentences(scorer, encoded, mask_id_of(TOKENIZER)).sums

    alone, states = scores(ALONE), mean_states(model, rows, 60)
    for found in on_every_rank(size, scores):
        assert np.array_equal(found, alone)
    for found in on_every_rank(size, lambda team: mean_states(model, rows, 60, team)):
        assert torch.equal(found, states)
    model.train()


def test_figures_of_every_kind(model: Any, tmp_path: Path) -> None:
    """A text's class follows from one word; the second of two related texts is the first; gaps have one answer."""
    generator = np.random.default_rng(1)
    write_pairs(tmp_path / "pairs.jsonl", 50)
    write_reviews(tmp_path / "reviews.csv", 400)
    texts = [f"the {NOUNS[i % 10]} {sentence(generator)}" for i in range(160)]
    (tmp_path / "same.csv").write_text(
        "a,b,y\n" + "\n".join(f"{text},{text if i % 2 else texts[i - 3]},{i % 2}" for i, text in enumerate(texts))
    )
    gaps = [{"text": f"the ___ sees the {noun} .", "answer": "cat", "choices": ["cat", "dog"]} for noun in NOUNS]
    (tmp_path / "gaps.jsonl").write_text("".join(f"{json.dumps(gap)}\n" for gap in gaps))
    shared = {"format": "csv", "train": "same.csv", "dev": "same.csv"}
    columns = {"text": "a", "text_pair": "b", "label": "y"}
    tasks = [
        *choose_tasks(["blimp"], {}),
        *choose_tasks([str(tmp_path / "reviews.csv")], {"text": "text", "label": "stars"}),
        make_task({"name": "same", "kind": "pair", "metrics": ["accuracy"], "labels": ["0", "1"], "positive": "1",
                   "columns": columns, **shared}, "here"),
        make_task({"name": "alike", "kind": "regress", "metrics": ["spearman"], "columns": columns, **shared}, "here"),
        make_task({"name": "gaps", "kind": "cloze", "format": "jsonl", "metrics": ["accuracy"], "dev": "gaps.jsonl",
                   "columns": {"text": "text", "answer": "answer", "choices": "choices"}}, "here"),
    ]  # fmt: skip
    (tmp_path / "blimp").mkdir()
    (tmp_path / "pairs.jsonl").rename(tmp_path / "blimp" / "pairs.jsonl")
    figures: dict[str, float] = {}
    for task in tasks:
        probe = build_probe(load_data(task, tmp_path), TOKENIZER, 64)
        assert 0 < probe.units_for(0) <= MIN_UNITS <= probe.units_for(1e9) or task.name == "gaps"
        found = [probe.judge(probe.compute(model, n, ALONE), n) for n in (probe.num_units, probe.num_units)]
        assert found[0] == found[1]
        assert list(found[0]) == probe_names(task)
        figures |= found[0]
    assert model.training
    assert figures["reviews"] > 0.9
    assert figures["same"] > 0.9
    assert figures["same_nearest"] > 0.9
    assert figures["alike"] > 0.8
    assert 0 <= figures["blimp"] <= 1
    assert figures["gaps"] in [number / 10 for number in range(11)]


def test_units_follow_from_tokens_and_prefixes_have_all_groups(tmp_path: Path) -> None:
    (tmp_path / "blimp").mkdir()
    write_pairs(tmp_path / "blimp" / "pairs.jsonl", 200)
    probe = build_probe(load_data(choose_tasks(["blimp"], {})[0], tmp_path), TOKENIZER, 64)
    cost = float(probe.costs[:100].sum())
    assert probe.units_for(cost) == 100
    assert probe.units_for(cost - 1) == 99
    again = build_probe(load_data(choose_tasks(["blimp"], {})[0], tmp_path), TOKENIZER, 64)
    assert [item.ids for item in probe.sentences] == [item.ids for item in again.sentences]  # type: ignore[attr-defined]


def test_a_model_that_diverged_has_no_figure_and_other_kinds_are_refused(model: Any, tmp_path: Path) -> None:
    write_reviews(tmp_path / "reviews.csv", 60)
    (task,) = choose_tasks([str(tmp_path / "reviews.csv")], {"text": "text", "label": "stars"})
    probe = build_probe(load_data(task, None), TOKENIZER, 8)
    assert probe.num_shortened == 30  # six rows are held out, and four learned from for each of them
    states = torch.full_like(probe.compute(model, 5, ALONE), torch.nan)
    assert np.isnan(probe.judge(states, 5)["reviews"])
    with pytest.raises(UserError, match='--probe conll2003: its kind "tokens" needs a fine-tuned model'):
        check_kind(choose_tasks(["conll2003"], {})[0])
