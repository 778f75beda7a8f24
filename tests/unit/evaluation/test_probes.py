"""Probes of a model in memory."""

import numpy as np
import pytest
import torch

from evaluation import probes
from evaluation.pseudo_likelihood.native import to_native
from tests.unit.evaluation.tiny import make_model, make_tokenizer, sentence

TOKENIZER = make_tokenizer()


@pytest.mark.parametrize("pre_ln", [True, False])
def test_pooled_states_are_those_of_stock_transformers(pre_ln: bool) -> None:
    generator = np.random.default_rng(0)
    texts = [" ".join(sentence(generator) for _ in range(1 + i % 4)) for i in range(11)]
    model = make_model(TOKENIZER, pre_ln)
    ours = to_native(model.state_dict(), model.config.to_dict(), "here").train()
    features = probes.pooled_features(ours, TOKENIZER, texts, max_tokens=30)
    batch = TOKENIZER(texts, padding=True, truncation=True, max_length=30, return_tensors="pt")
    mask = batch["attention_mask"]
    with torch.inference_mode():
        states = model.base_model(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state * mask[..., None]
    assert torch.allclose(features, states.sum(1) / mask.sum(1, keepdim=True), atol=1e-4)
    assert ours.training


def test_logistic_regression_finds_a_direction_and_is_deterministic() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(200, 16, generator=generator)
    labels = (features[:, 3] > 0).long().tolist()
    first = probes.logistic_probe(features[:150], labels[:150], features[150:], labels[150:])
    assert first > 0.9
    assert first == probes.logistic_probe(features[:150], labels[:150], features[150:], labels[150:])
    shuffled = [labels[i] for i in torch.randperm(200, generator=generator)]
    assert probes.logistic_probe(features[:150], shuffled[:150], features[150:], shuffled[150:]) < 0.75


def test_similarity_and_nearest_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(40, 8, generator=generator) + 5
    noise = torch.linspace(0, 8, 40)[:, None] * torch.randn(40, 8, generator=generator)
    assert probes.nearest_neighbour_accuracy(first, first.clone()) == 1
    assert probes.nearest_neighbour_accuracy(first, first.flip(0)) == 0
    assert probes.similarity_correlation(first, first + noise, list(range(40, 0, -1))) > 0.5
    assert probes.similarity_correlation(first, first, [1.0] * 40) == 0
