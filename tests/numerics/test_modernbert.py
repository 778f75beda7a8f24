"""ModernBERT's keys against the stock class: size, logits, loss and every gradient, at odd sizes with padding."""

from typing import Any

import pytest
import torch
import transformers

from nvidia.config import BertConfig
from nvidia.interop.hugging_face import to_hugging_face
from nvidia.modelingpreln import BertForPreTrainingPreLN
from tests.support import PROJECT
from tests.unit.nvidia.helpers import largest_difference, make_batch, spread_weights, tiny_config
from training.planning.workload import count_parameters
from training.settings.model_file import load_model_file

BOUND = 1e-5
SIZES = {
    "base": {},  # the stock defaults
    "large": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 2624},
}
ALL_BIASES = {"use_bias": True, "norm_bias": True, "head_bias": True}


def shipped_config(name: str) -> BertConfig:
    return load_model_file(PROJECT / "configs" / f"modernbert_{name}.json").bert_config()


@pytest.mark.parametrize(("name", "count"), [("base", 149_655_232), ("large", 395_881_664)])
def test_shipped_files_have_the_size_of_the_published_models(name: str, count: int) -> None:
    config, stock = shipped_config(name), transformers.ModernBertConfig(**SIZES[name])
    with torch.device("meta"):
        ours, theirs = BertForPreTrainingPreLN(config), transformers.ModernBertForMaskedLM(stock)
    assert sum(map(torch.numel, ours.parameters())) == sum(map(torch.numel, theirs.parameters())) == count
    assert count_parameters(config).total == count
    kinds = {0: "full_attention", stock.local_attention: "sliding_attention"}
    layers = range(config.num_hidden_layers)
    assert [kinds[config.window(layer)] for layer in layers] == stock.layer_types
    for layer, kind in zip(layers, stock.layer_types, strict=True):
        assert config.rope_base(layer) == stock.rope_parameters[kind]["rope_theta"]


@pytest.mark.parametrize("changes", [{}, ALL_BIASES, {"decoder_bias": False, "global_attention_every": 2}])
def test_logits_loss_and_gradients_are_those_of_the_stock_class(changes: dict[str, Any]) -> None:
    keys = shipped_config("tiny").to_dict() | {"num_hidden_layers": 4, "attention_window": 5, "vocab_size": 104}
    sizes = {key: getattr(tiny_config(), key) for key in ("hidden_size", "num_attention_heads", "intermediate_size")}
    config = BertConfig.from_dict(keys | sizes | {"max_position_embeddings": 41} | changes)
    ours = BertForPreTrainingPreLN(config)
    spread_weights(ours)
    tensors, content, _ = to_hugging_face(ours.state_dict(), config)
    stock = transformers.ModernBertConfig(**content, attn_implementation="eager")
    theirs = transformers.ModernBertForMaskedLM(stock).eval()
    assert theirs.load_state_dict(tensors, strict=False) == (["decoder.weight"], [])  # missing: tied
    theirs.tie_weights()

    batch = make_batch((37, 9, 37, 1, 20), 37)
    _, ids, mask, segments, _, labels = batch
    real = mask.bool()
    logits = theirs(ids, mask).logits
    assert largest_difference(ours.masked_lm_logits(ids, mask, segments)[real], logits[real]) <= 10 * BOUND
    loss = ours.train()(batch)
    expected = torch.nn.functional.cross_entropy(logits[labels != -1], labels[labels != -1])
    assert largest_difference(loss, expected) <= BOUND
    loss.backward()
    expected.backward()
    gradients, _, _ = to_hugging_face({name: each.grad for name, each in ours.named_parameters()}, config)
    assert gradients.keys() == tensors.keys()
    for name, found in gradients.items():
        gradient = theirs.get_parameter(name).grad
        assert gradient is not None
        assert largest_difference(found, gradient) <= BOUND * max(1.0, float(gradient.abs().max())), name
