"""Conversion of our configuration to the content of a stock config.json and back."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from common.errors import UserError
from nvidia.activations import is_gated, ungated
from nvidia.config import BertConfig
from nvidia.interop.families import Family, family_of, family_of_type

# our hidden_act → the name of the same function in transformers
_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "swish": "silu", "silu": "silu",
                "tanh": "tanh"}  # fmt: skip
# hidden_act of transformers, including its other names for the same formula → ours
_STOCK_ACTIVATIONS = {theirs: ours for ours, theirs in _ACTIVATIONS.items()} | {
    "swish": "silu", "gelu_new": "gelu_tanh", "gelu_python_tanh": "gelu_tanh", "gelu_python": "gelu"
}  # fmt: skip
_GATES = {"gelu": "geglu", "silu": "swiglu"}  # activation of ModernBERT → our hidden_act
_SAME_KEYS = (
    "hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_dropout_prob "
    "attention_probs_dropout_prob type_vocab_size initializer_range layer_norm_eps pad_token_id tie_word_embeddings"
).split()
# our keys → those of ModernBERT
_MODERN_KEYS = {
    **{key: key for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                            "initializer_range", "pad_token_id", "tie_word_embeddings", "max_position_embeddings",
                            "norm_bias", "decoder_bias", "attention_bias", "mlp_bias")},
    "hidden_dropout_prob": "mlp_dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "layer_norm_eps": "norm_eps",
    "head_bias": "classifier_bias",
}  # fmt: skip
# What stock code assumes where config.json does not say.
_MODERN_DEFAULTS = {
    "hidden_size": 768, "num_hidden_layers": 22, "num_attention_heads": 12, "intermediate_size": 1152, "norm_eps": 1e-5,
    "pad_token_id": 50283, "max_position_embeddings": 8192, "norm_bias": False, "attention_bias": False,
    "mlp_bias": False, "classifier_bias": False, "mlp_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
_VOCAB_SIZES = {"roberta": 50265, "roberta-prelayernorm": 50265, "modernbert": 50368}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def export_obstacles(config: BertConfig, pre_ln: bool) -> list[str]:
    """The parts of the model that its stock class does not compute, each with what the class has."""
    family = family_of(config, pre_ln)
    if family.is_pre_ln != pre_ln:
        words = {True: "pre-LN", False: "post-LN"}
        return [f"export_as {family.model_type!r} is {words[family.is_pre_ln]}, but the model is {words[pre_ln]}"]
    act, positions, types = config.hidden_act, config.position_embedding_type, config.type_vocab_size
    checks = [
        (config.qk_norm, "qk_norm", ""),
        (bool(config.pruned_heads), "pruned_heads", ""),
        (config.is_sparse, "sparse attention", ""),
    ]
    if family.is_modern:
        checks += [
            (not config.is_rotary, f"position_embedding_type {positions!r}", ""),
            (not is_gated(act), f"hidden_act {act!r}", ", which has geglu, swiglu"),
            (config.first_attention_norm, "first_attention_norm true", ", whose first block has no such norm"),
            (types > 0, f"type_vocab_size {types}", "; it has none, as with 0"),
        ]
    else:
        known = ("gelu",) if family.head_is_gelu else tuple(_ACTIVATIONS)
        biases = (
            config.has_attention_bias,
            config.has_mlp_bias,
            config.norm_bias,
            config.head_bias,
            config.decoder_bias,
        )
        checks += [
            (act not in known, f"hidden_act {act!r}", f", which has {', '.join(known)}"),
            (positions != "absolute", f"position_embedding_type {positions!r}", ""),
            (not all(biases), "use_bias false", ", which has all biases"),
            (config.attention_window > 0, "attention_window", ", whose attention is dense"),
            (pre_ln and not config.first_attention_norm, "first_attention_norm false", ""),
            (types == 0, "type_vocab_size 0", ", which has token types"),
        ]
    return [f"{part} has no equivalent in {family.architecture}{why}" for is_found, part, why in checks if is_found]


def to_stock_config(config: BertConfig, family: Family) -> dict[str, Any]:
    """The content of config.json."""
    values: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.num_tokens,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family.is_modern:
        return values | _to_modern(config)
    if family.has_sentence_head and not config.has_sentence_head:
        values["architectures"] = ["BertForMaskedLM"]
    shift = config.pad_token_id + 1 if family.shifts_positions else 0
    return values | {
        **{key: getattr(config, key) for key in _SAME_KEYS},
        "hidden_act": _ACTIVATIONS[config.hidden_act],
        "max_position_embeddings": config.max_position_embeddings + shift,
    }


def _to_modern(config: BertConfig) -> dict[str, Any]:
    full, sliding = config.rope_theta, config.local_rope_theta or config.rope_theta
    activation = _ACTIVATIONS[ungated(config.hidden_act)]
    windows = [config.window(layer) for layer in range(config.num_hidden_layers)]
    explicit = replace(config, attention_bias=config.has_attention_bias, mlp_bias=config.has_mlp_bias)
    return {theirs: getattr(explicit, ours) for ours, theirs in _MODERN_KEYS.items()} | {
        "embedding_dropout": config.hidden_dropout_prob,
        "hidden_activation": activation,
        "classifier_activation": activation,
        "local_attention": config.attention_window or 128,  # without effect where no layer has a window
        "layer_types": [_SLIDING if window else _FULL for window in windows],
        "rope_parameters": {
            _FULL: {"rope_type": "default", "rope_theta": full},
            _SLIDING: {"rope_type": "default", "rope_theta": sliding},
        },
        # Names of the same in transformers 4.
        "global_attn_every_n_layers": config.global_attention_every or None,
        "global_rope_theta": full,
        "local_rope_theta": sliding,
        "cls_token_id": None,
        "sep_token_id": None,
    }


def from_stock_config(config_dict: Mapping[str, Any]) -> BertConfig:
    """Our configuration of a stock model, with the vocabulary not padded; refuses what ours cannot compute."""
    family = family_of_type(config_dict.get("model_type"))
    if config_dict.get("is_decoder") or config_dict.get("add_cross_attention"):
        raise UserError(
            "config.json describes a decoder (is_decoder or add_cross_attention); give the checkpoint of an encoder"
        )
    values = _from_modern(config_dict) if family.is_modern else _from_classic(config_dict, family)
    return BertConfig.from_dict(
        {"vocab_size": config_dict.get("vocab_size", _VOCAB_SIZES.get(family.model_type, 30522)), **values}
    )


def _read_activation(config_dict: Mapping[str, Any], key: str, known: Mapping[str, str]) -> str:
    act = config_dict.get(key, "gelu")
    if act not in known:
        raise UserError(
            f"config.json: {key} is {act!r}, expected one of {', '.join(known)}; give a checkpoint with one of these"
        )
    return known[act]


def _from_classic(config_dict: Mapping[str, Any], family: Family) -> dict[str, Any]:
    kind = family.model_type
    act = _read_activation(config_dict, "hidden_act", _STOCK_ACTIVATIONS)
    if family.head_is_gelu and act != "gelu":
        raise UserError(
            f"config.json: hidden_act is {config_dict['hidden_act']!r}, but the masked-token head of {kind} always "
            "computes gelu, and a model here has one activation for both; give a checkpoint with hidden_act 'gelu'"
        )
    values = {key: config_dict[key] for key in _SAME_KEYS if key in config_dict}
    if values.setdefault("pad_token_id", 1 if family.shifts_positions else 0) is None:
        if family.shifts_positions:
            raise UserError(
                f"config.json: pad_token_id is null, but positions of {kind} are numbered from pad_token_id + 1; "
                "set it to the id of the padding token that the model was trained with"
            )
        del values["pad_token_id"]  # nothing in a BERT depends on it
    shift = values["pad_token_id"] + 1 if family.shifts_positions else 0
    return values | {
        "hidden_act": act,
        "max_position_embeddings": config_dict.get("max_position_embeddings", 512) - shift,
        "position_embedding_type": config_dict.get("position_embedding_type") or "absolute",
        # The usual family of a kind need not be named.
        "export_as": kind if family.shifts_positions and not family.is_pre_ln else None,
    }


def _from_modern(config_dict: Mapping[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {**_MODERN_DEFAULTS, **config_dict}
    act = _read_activation(given, "hidden_activation", _GATES)
    if _read_activation(given, "classifier_activation", _GATES) != act:
        raise UserError(
            f"config.json: classifier_activation is {given['classifier_activation']!r}, but a model here has one "
            f"activation for the blocks and the masked-token head; give a checkpoint where both are equal"
        )
    every, window = _read_layer_types(given)
    full, sliding = _read_rope(given)
    values = {ours: given[theirs] for ours, theirs in _MODERN_KEYS.items() if theirs in given}
    if values.get("pad_token_id") is None:
        values["pad_token_id"] = 0  # nothing depends on it
    return values | {
        "hidden_act": act,
        "position_embedding_type": "rotary",
        "rope_theta": full,
        "local_rope_theta": sliding if window and sliding != full else None,
        "attention_window": window,
        "global_attention_every": every,
        "first_attention_norm": False,
        "type_vocab_size": 0,
    }


def _read_layer_types(given: Mapping[str, Any]) -> tuple[int, int]:
    """(global_attention_every, attention_window) of a ModernBERT."""
    layers, window = given["num_hidden_layers"], given.get("local_attention", 128)
    every = given.get("global_attn_every_n_layers")
    types = given.get("layer_types")
    if types is None:
        types = [_SLIDING if layer % (every or 3) else _FULL for layer in range(layers)]
    if _SLIDING not in types:
        return 1, 0
    if _FULL not in types:
        return 0, window
    for period in (*([every] if every else ()), *range(2, layers + 1)):
        if types == [_SLIDING if layer % period else _FULL for layer in range(layers)]:
            return period, window
    shown = "".join("F" if kind == _FULL else "s" for kind in types)
    raise UserError(
        f"config.json: layer_types is {shown} (F: full, s: sliding), expected full attention in layers 0, n, 2n … "
        "and windows in the others, or one kind in all; give a checkpoint with such layers"
    )


def _read_rope(given: Mapping[str, Any]) -> tuple[float, float]:
    """The bases of rotary positions in layers that see everything, and in layers with a window."""
    parameters = given.get("rope_parameters") or {}
    bases: list[float] = []
    for kind, old_key, default in ((_FULL, "global_rope_theta", 160_000.0), (_SLIDING, "local_rope_theta", 10_000.0)):
        found = parameters.get(kind) or {}
        if found.get("rope_type", "default") != "default" or given.get("rope_scaling"):
            raise UserError(
                "config.json: rotary positions are scaled (rope_type or rope_scaling), expected 'default'; give a "
                "checkpoint without scaling"
            )
        base = found.get("rope_theta", given.get(old_key, default))
        bases.append(float(bases[0] if base is None else base))
    return bases[0], bases[1]
