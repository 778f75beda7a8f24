"""ModernBERT's keys against the stock class: logits, loss and every gradient, at odd sizes with padding."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from nvidia.config import BertConfig
from nvidia.modelingpreln import BertForPreTrainingPreLN
from tests.support import PROJECT
from tests.unit.nvidia.helpers import largest_difference, make_batch, spread_weights, tiny_config
from training.planning.workload import count_parameters
from training.settings.model_file import load_model_file

BOUND = 1e-5
# What makes a BertConfig ModernBERT; sizes are those of the tests.
MODERN: dict[str, Any] = {
    "hidden_act": "geglu",
    "position_embedding_type": "rotary",
    "rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    "attention_window": 5,
    "global_attention_every": 3,
    "type_vocab_size": 0,
    "use_bias": False,
    "norm_bias": False,
    "head_bias": False,
    "first_attention_norm": False,
    "layer_norm_eps": 1e-5,
    "sentence_head": "none",
}
LENGTHS = (37, 9, 37, 1, 20)


def modern_config(**changes: Any) -> BertConfig:
    return tiny_config(**{"num_hidden_layers": 4, "max_position_embeddings": 41, **MODERN, **changes})


def stock_model(config: BertConfig) -> transformers.ModernBertForMaskedLM:
    theirs = transformers.ModernBertConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        local_attention=config.attention_window,
        global_attn_every_n_layers=config.global_attention_every,
        attention_bias=config.has_attention_bias,
        mlp_bias=config.has_mlp_bias,
        norm_bias=config.norm_bias,
        classifier_bias=config.head_bias,
        decoder_bias=config.decoder_bias,
        norm_eps=config.layer_norm_eps,
        pad_token_id=0,
        attn_implementation="eager",
    )
    return transformers.ModernBertForMaskedLM(theirs).eval()


def stock_names(config: BertConfig) -> dict[str, tuple[str, ...]]:
    """Names of the stock class → ours; several of ours are joined there."""
    names = {
        "model.embeddings.tok_embeddings.weight": ("bert.embeddings.word_embeddings.weight",),
        "decoder.bias": ("cls.predictions.bias",),
    }
    modules = {
        "model.embeddings.norm": ("bert.embeddings.LayerNorm",),
        "model.final_norm": ("bert.encoder.FinalLayerNorm",),
        "head.dense": ("cls.predictions.transform.dense_act",),
        "head.norm": ("cls.predictions.transform.LayerNorm",),
    }
    for index in range(config.num_hidden_layers):
        ours, theirs = f"bert.encoder.layer.{index}", f"model.layers.{index}"
        modules |= {
            f"{theirs}.attn.Wqkv": tuple(f"{ours}.attention.self.{part}" for part in ("query", "key", "value")),
            f"{theirs}.attn.Wo": (f"{ours}.attention.output.dense",),
            f"{theirs}.attn_norm": (f"{ours}.PreAttentionLayerNorm",),
            f"{theirs}.mlp_norm": (f"{ours}.PostAttentionLayerNorm",),
            f"{theirs}.mlp.Wi": (f"{ours}.intermediate.dense_act",),
            f"{theirs}.mlp.Wo": (f"{ours}.output.dense",),
        }
    for theirs, parts in modules.items():
        for kind in ("weight", "bias"):
            names[f"{theirs}.{kind}"] = tuple(f"{part}.{kind}" for part in parts)
    return names


def joined(tensors: dict[str, Tensor], names: tuple[str, ...]) -> Tensor:
    return torch.cat([tensors[name] for name in names])


@pytest.mark.parametrize(("name", "count"), [("base", 149_655_232), ("large", 395_881_664)])
def test_shipped_files_have_the_size_of_the_published_models(name: str, count: int) -> None:
    config = load_model_file(PROJECT / "configs" / f"modernbert_{name}.json").bert_config()
    with torch.device("meta"):
        ours, theirs = BertForPreTrainingPreLN(config), stock_model(config)
    assert sum(map(torch.numel, ours.parameters())) == sum(map(torch.numel, theirs.parameters())) == count
    assert count_parameters(config).total == count
    stock = transformers.ModernBertConfig()  # whose defaults are the base model
    if name == "base":
        assert theirs.config.layer_types == stock.layer_types
        assert (config.hidden_size, config.intermediate_size) == (stock.hidden_size, stock.intermediate_size)
    bases = {config.window(layer) > 0: config.rope_base(layer) for layer in range(config.num_hidden_layers)}
    rope = stock.rope_parameters
    assert bases == {
        False: rope["full_attention"]["rope_theta"],
        True: rope["sliding_attention"]["rope_theta"],
    }


ALL_BIASES = {"use_bias": True, "norm_bias": True, "head_bias": True}


@pytest.mark.parametrize("changes", [{}, ALL_BIASES, {"decoder_bias": False, "global_attention_every": 2}])
def test_logits_loss_and_gradients_are_those_of_the_stock_class(changes: dict[str, Any]) -> None:
    config = modern_config(**changes)
    ours, theirs = BertForPreTrainingPreLN(config), stock_model(config)
    spread_weights(ours)
    weights, names = ours.state_dict(), stock_names(config)
    stock = {name: parameter for name, parameter in theirs.named_parameters() if name != "decoder.weight"}
    assert sum(map(torch.numel, ours.parameters())) == sum(map(torch.numel, stock.values()))
    with torch.no_grad():
        for name, parameter in stock.items():
            parameter.copy_(joined(weights, names[name]))

    batch = make_batch(LENGTHS, 37)
    _, ids, mask, segments, _, labels = batch
    real = mask.bool()
    logits = theirs(ids, mask).logits
    assert largest_difference(ours.masked_lm_logits(ids, mask, segments)[real], logits[real]) <= BOUND * 10
    loss = ours.train()(batch)
    expected = torch.nn.functional.cross_entropy(logits[labels != -1], labels[labels != -1])
    assert largest_difference(loss, expected) <= BOUND
    loss.backward()
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    for name, parameter in stock.items():
        assert parameter.grad is not None
        bound = BOUND * max(1.0, float(parameter.grad.abs().max()))
        assert largest_difference(joined(gradients, names[name]), parameter.grad) <= bound, name
