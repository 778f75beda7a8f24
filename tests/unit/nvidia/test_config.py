"""BertConfig: what it accepts, what it rejects, and its messages."""

from typing import Any

import pytest

from common.errors import UserError
from nvidia.config import BertConfig, padded_vocab_size
from tests.unit.nvidia.helpers import tiny_config

BING_BERT_BASE = {
    "vocab_size_or_config_json_file": 119547,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "initializer_range": 0.02,
}


def test_the_json_that_bing_bert_ships_loads() -> None:
    assert BertConfig.from_dict(BING_BERT_BASE) == BertConfig(vocab_size=119547)


def test_round_trip_through_plain_values() -> None:
    config = tiny_config(pruned_heads={1: (0, 2)}, hidden_act="geglu", unpadded_vocab_size=99)
    assert BertConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(("size", "padded"), [(30522, 30528), (30528, 30528), (1, 8)])
def test_vocabulary_is_padded_to_eight(size: int, padded: int) -> None:
    assert padded_vocab_size(size) == padded
    config = BertConfig(vocab_size=size).with_padded_vocab()
    assert (config.vocab_size, config.num_tokens) == (padded, size)
    assert config.with_padded_vocab() == config


def test_an_unknown_key_is_named_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown key 'hidden_sise'; did you mean 'hidden_size'\?"):
        BertConfig.from_dict({"vocab_size": 8, "hidden_sise": 4})


def test_the_two_names_of_the_vocabulary_must_agree() -> None:
    with pytest.raises(UserError, match="both vocab_size"):
        BertConfig.from_dict({"vocab_size": 8, "vocab_size_or_config_json_file": 9})


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(UserError) as caught:
        BertConfig(vocab_size=0, hidden_act="gelo", hidden_dropout_prob=1.0, num_hidden_layers=True)
    message = str(caught.value)
    for part in ("vocab_size is 0", "hidden_act is 'gelo'", "did you mean 'gelu'", "hidden_dropout_prob is 1.0",
                 "num_hidden_layers is True", "4 problems"):  # fmt: skip
        assert part in message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": 10**5000}, "hidden_size is a number of thousands of digits, expected a whole number from 1"),
        ({"hidden_size": 8.0}, "hidden_size is 8.0, expected a whole number from 1 up"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps is nan, expected a number between 0 and 1"),
        ({"hidden_dropout_prob": True}, "hidden_dropout_prob is True, expected a number from 0 to below 1"),
        ({"use_bias": 1}, "use_bias is 1, expected true or false"),
        ({"attention_backend": ["sdpa"]}, r"attention_backend is \['sdpa'\], expected one of auto, "),
        ({"unpadded_vocab_size": 0}, "unpadded_vocab_size is 0"),
        ({"pruned_heads": {"0": 1}}, "pruned_heads is .*expected lists of heads by layer"),
        ({"pruned_heads": [1]}, "pruned_heads is .*expected lists of heads by layer"),
        ({"sparse_attention": 5}, "sparse_attention is 5, expected a mapping with a mode"),
        ({"sparse_attention": {"mode": "fixd"}}, "sparse_attention: mode is 'fixd'"),
        ({"self": 1}, "unknown key 'self'"),
    ],
)
def test_each_invalid_value_is_named_with_what_is_expected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        BertConfig.from_dict({"vocab_size": 8, **values})


def test_unknown_keys_missing_keys_and_invalid_values_are_reported_together() -> None:
    with pytest.raises(UserError) as caught:
        BertConfig.from_dict({"hidden_sise": 4, "hidden_act": "gelo", "sparse_attention": {"mode": "fixd"}})
    assert len(caught.value.parts) == 4
    for part in ("vocab_size is missing", "unknown key 'hidden_sise'", "hidden_act is 'gelo'", "mode is 'fixd'"):
        assert part in str(caught.value)


def test_windows_rope_bases_and_biases_of_each_layer() -> None:
    config = tiny_config(num_hidden_layers=5, attention_window=8, global_attention_every=2, use_bias=False,
                         position_embedding_type="rotary", local_rope_theta=100.0, mlp_bias=True)  # fmt: skip
    assert [config.window(layer) for layer in range(5)] == [0, 8, 0, 8, 0]
    assert [config.rope_base(layer) for layer in range(3)] == [1e4, 100.0, 1e4]
    assert (config.has_attention_bias, config.has_mlp_bias) == (False, True)
    assert tiny_config(attention_window=8, global_attention_every=0).window(0) == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 5}, "24, which is not divisible by 5 attention heads"),
        ({"pad_token_id": 200}, "pad_token_id 200 is past"),
        ({"unpadded_vocab_size": 300}, "unpadded_vocab_size is 300"),
        ({"pruned_heads": {7: (0,)}}, "names layer 7"),
        ({"pruned_heads": {0: (0, 1, 2)}}, "with no head"),
        ({"pruned_heads": {0: (5,)}}, "different heads from 0 to 2"),
        ({"position_embedding_type": "rotary", "num_attention_heads": 8}, "even head size, but .* is 3"),
        ({"local_rope_theta": 1e4}, "local_rope_theta is 10000.0, but position_embedding_type is 'absolute'"),
        ({"position_embedding_type": "rotary", "position_offset": 2}, "'rotary' positions have no table"),
        ({"attention_window": 20, "global_attention_every": 0}, "20, wider than any row .* is 19"),
        ({"attention_window": 8}, "with global_attention_every 1 no layer has a window"),
        ({"attention_window": 1, "global_attention_every": 0}, "attention_window is 1, where a token sees only itself"),
        ({"global_attention_every": 3}, "global_attention_every is 3, but there is no attention_window"),
        ({"attention_window": 8, "global_attention_every": 3, "sparse_attention": {"mode": "fixed"}}, "remove one"),
    ],
)
def test_values_that_do_not_fit_together(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny_config(**changes)
