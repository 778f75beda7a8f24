"""Pseudo-log-likelihood: the formula, the fast path against stock transformers, maskings, ties and cloze."""

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from benchmarks import minimal_pairs
from common.errors import UserError
from evaluation.probes import minimal_pair_accuracy
from evaluation.pseudo_likelihood import native
from evaluation.pseudo_likelihood.likelihood import (
    Encoded,
    Masking,
    StockScorer,
    encode,
    make_queries,
    mask_id_of,
    score_sentences,
)
from evaluation.pseudo_likelihood.minimal_pairs import fill_gap, score_cloze, score_pairs
from evaluation.pseudo_likelihood.native import PackedScorer, load_native, to_native
from nvidia.cpu import libraries
from nvidia.cpu.libraries import Libraries
from nvidia.fastest import Measured
from tests.unit.evaluation.tiny import NOUNS, make_model, make_tokenizer, save_model, sentence

TOKENIZER = make_tokenizer()
GENERATOR = np.random.default_rng(0)
# Of very different lengths: packing and padding must not matter.
SENTENCES = [" ".join(sentence(GENERATOR) for _ in range(1 + i % 4)) for i in range(13)]


def written_out(model: Any, ids: tuple[int, ...], masked: list[int], scored: int) -> float:
    row = torch.tensor([ids])
    row[0, masked] = TOKENIZER.mask_token_id
    return float(model(input_ids=row).logits[0, scored].log_softmax(-1)[ids[scored]])


@torch.no_grad()
def test_a_sentence_has_the_sum_over_tokens_masked_in_turn() -> None:
    model = make_model(TOKENIZER)
    (item,) = encode(TOKENIZER, SENTENCES[:1])
    free = range(1, len(item.ids) - 1)
    expected = {
        "token": sum(written_out(model, item.ids, [place], place) for place in free),
        "word": sum(
            written_out(model, item.ids, [p for p in free if item.words[p] == item.words[place]], place)
            for place in free
        ),
        "word_l2r": sum(
            written_out(model, item.ids, [p for p in free if p >= place and item.words[p] == item.words[place]], place)
            for place in free
        ),
    }
    assert len({item.words[place] for place in free}) < len(free)  # else the three would be one
    for masking in get_args(Masking):
        scores = score_sentences(StockScorer(model, 0), [item], TOKENIZER.mask_token_id, masking)
        assert scores.sums[0] == pytest.approx(expected[masking], abs=1e-4)
        assert scores.means[0] == pytest.approx(expected[masking] / len(free), abs=1e-4)


@pytest.mark.parametrize("pre_ln", [True, False])
@pytest.mark.parametrize("masking", get_args(Masking))
def test_our_model_gives_the_same_scores_on_packed_tokens(pre_ln: bool, masking: Any) -> None:
    model = make_model(TOKENIZER, pre_ln)
    ours = to_native(model.state_dict(), model.config.to_dict(), "here")
    encoded = encode(TOKENIZER, SENTENCES)
    mask = mask_id_of(TOKENIZER)
    stock = score_sentences(StockScorer(model, 0, batch_size=7), encoded, mask, masking)
    packed = score_sentences(PackedScorer(ours, tokens_at_once=90), encoded, mask, masking)
    assert np.abs(stock.sums - packed.sums).max() < 1e-4
    assert (stock.num_tokens == packed.num_tokens).all()
    assert np.ptp(stock.sums) > 1


def test_products_are_computed_by_the_chosen_library(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = make_model(TOKENIZER)
    monkeypatch.setattr(libraries, "_in_use", Libraries())
    monkeypatch.setattr(native, "measure_libraries", lambda *_: Measured(Libraries(forward="onednn")))
    for choice, expected in (("measured", "onednn"), ("torch", "torch")):
        monkeypatch.setenv("CPU_PRODUCTS", choice)
        native.use_fastest_products(to_native(stock.state_dict(), stock.config.to_dict(), ""))
        assert libraries.in_use().forward == expected


def test_scoring_leaves_a_model_in_training_as_it_was() -> None:
    model = make_model(TOKENIZER)
    ours = to_native(model.state_dict(), model.config.to_dict(), "here").train()
    pairs = [(SENTENCES[0], SENTENCES[4])]
    assert minimal_pair_accuracy(PackedScorer(ours), TOKENIZER, pairs) in (0.0, 1.0)
    assert ours.training


def test_an_export_is_read_from_its_folder_and_others_are_refused_with_the_reason(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", pre_ln=False)
    assert load_native(folder).config.hidden_size == 32
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"bert"', '"electra"'))
    with pytest.raises(UserError, match="electra"):
        load_native(folder)
    (folder / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(UserError, match=r"model.safetensors: cannot be read as safetensors .*Copy the folder again"):
        load_native(folder)


def test_equal_masked_copies_are_computed_once() -> None:
    first, second = encode(TOKENIZER, ["the cat sees the dog .", "the dog sees the dog ."])
    assert len(first.ids) == len(second.ids)
    differing = [place for place in range(len(first.ids)) if first.ids[place] != second.ids[place]]
    assert len(differing) == 1
    copies = [((place,), (place,)) for place in range(1, len(first.ids) - 1)]
    queries = make_queries([(first, copies), (second, copies)], TOKENIZER.mask_token_id)
    assert len(queries.targets) == 2 * len(copies)
    assert len(queries.inputs) == 2 * len(copies) - 1


class PositionScorer:
    """Gives every token the log-probability -position: sums and means then prefer different sentences."""

    def answer(self, queries: Any, with_ranks: bool = False) -> Any:
        from evaluation.pseudo_likelihood.likelihood import Answers

        return Answers(-queries.positions.astype(np.float32), np.ones_like(queries.positions))


def test_ties_count_one_half_and_sums_and_means_are_both_reported() -> None:
    pairs = [
        ("the cat .", "the cat ."),
        ("the cat .", "the cat sees the dog ."),
        ("the cat sees the dog .", "the cat ."),
    ]
    scores = score_pairs(PositionScorer(), TOKENIZER, pairs)
    assert scores.by_sum.tolist() == [0.5, 1.0, 0.0]
    assert scores.accuracy == 0.5
    assert scores.by_mean.tolist()[0] == 0.5
    assert scores.num_shortened == 0


def test_long_sentences_are_cut_before_their_closing_token_and_counted() -> None:
    item = Encoded((2, 7, 8, 9, 3), (None, 0, 1, 2, None), ((0, 0), (0, 1), (2, 3), (4, 5), (0, 0)))
    assert item.shortened(4).ids == (2, 7, 8, 3)
    scores = score_pairs(PositionScorer(), TOKENIZER, [(SENTENCES[3], SENTENCES[0])], max_positions=10)
    assert scores.num_shortened == 1 + (len(encode(TOKENIZER, SENTENCES[:1])[0].ids) > 10)


@torch.no_grad()
def test_cloze_with_choices_and_against_the_whole_vocabulary() -> None:
    model = make_model(TOKENIZER)
    scorer = StockScorer(model, 0)
    text = "the [MASK] sees the dog ."
    row = torch.tensor([TOKENIZER(text)["input_ids"]])
    place = int((row[0] == TOKENIZER.mask_token_id).nonzero())
    scores = model(input_ids=row).logits[0, place]
    single = [word for word in ("the", "good", "bad", ".", "cat", "dog") if len(TOKENIZER.tokenize(word)) == 1]
    best = max(single, key=lambda word: float(scores[TOKENIZER.convert_tokens_to_ids(word)]))
    rows = [
        {"text": text, "answer": best, "choices": single},
        {"text": text.replace("[MASK]", "____"), "answer": single[0]},
        {"text": text, "answer": "teacher", "choices": ["teacher", best]},  # of several pieces
    ]
    result = score_cloze(scorer, TOKENIZER, rows)
    assert result.correct[0] == 1
    rank = 1 + int((scores > scores[TOKENIZER.convert_tokens_to_ids(single[0])]).sum())
    assert result.reciprocal_ranks[1] == pytest.approx(1 / rank)
    assert result.correct[1] == float(rank == 1)
    assert result.reciprocal_ranks[2] in (1.0, 0.5)


def test_a_long_cloze_text_is_cut_around_its_gap_alike_for_all_choices() -> None:
    words = [NOUNS[i % 8] for i in range(20)]
    choices = ["cat", "teacher"]  # of one and of two tokens
    for place, context in ((0, words[1:5]), (10, [*words[8:10], *words[11:13]]), (19, words[15:19])):
        text = " ".join([*words[:place], "[MASK]", *words[place + 1 :]])
        filled = fill_gap(TOKENIZER, {"text": text, "answer": "cat", "choices": choices}, 8)
        assert filled.was_cut
        for choice, (copy, hidden) in zip(choices, filled.copies, strict=True):
            tokens = TOKENIZER.convert_ids_to_tokens(list(copy.ids))
            assert [tokens[i] for i in hidden] == TOKENIZER.tokenize(choice)
            assert [token for i, token in enumerate(tokens) if i not in hidden] == ["[CLS]", *context, "[SEP]"]
    rows = [{"text": text, "answer": "cat"}, {"text": "the [MASK]", "answer": "cat"}]
    assert score_cloze(PositionScorer(), TOKENIZER, rows, max_positions=8).num_shortened == 1
    with pytest.raises(UserError, match="a choice has 2 tokens, but the model has 3 positions"):
        fill_gap(TOKENIZER, {"text": text, "answer": "teacher"}, 3)


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ({"text": "no gap here", "answer": "cat"}, "has 0 gaps"),
        ({"text": "a [MASK] b", "answer": "cat", "choices": ["dog"]}, "is not among"),
        ({"text": "a [MASK] b", "answer": "cat", "choices": "cat|dog"}, "expected a list of texts"),
    ],
)
def test_rows_that_are_no_cloze(row: dict[str, Any], part: str) -> None:
    with pytest.raises(UserError, match=part):
        score_cloze(PositionScorer(), TOKENIZER, [row])


@pytest.mark.parametrize("options", [[], ["--post_ln"]])
def test_the_benchmarks_last_line(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    sizes = ["--hidden", "64", "--layers", "1", "--vocab_size", "99", "--pairs", "21", "--repeats", "1"]
    try:
        assert minimal_pairs.main([*sizes, *options]) == 0
    finally:
        torch.set_num_threads(threads)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["ratio"] > 0
    assert result["largest_difference"] < 1e-4
