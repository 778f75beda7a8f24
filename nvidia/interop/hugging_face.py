"""Conversion of our weights to Hugging Face's names and back: tensors in, tensors out, no files.

Pre-LN is `RobertaPreLayerNormForMaskedLM` of transformers, which has no pooler and no sentence head: these are returned
as extra tensors. Post-LN is `BertForPreTraining`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from common.errors import Problems, UserError
from nvidia.config import BertConfig, padded_vocab_size

Tensors = dict[str, Tensor]

WORDS = "bert.embeddings.word_embeddings.weight"
POSITIONS = "bert.embeddings.position_embeddings.weight"
DECODER = "cls.predictions.decoder.weight"
BIAS = "cls.predictions.bias"
_PRE_LN_ONLY = "bert.encoder.FinalLayerNorm.weight"
# The heads that a stock checkpoint may omit completely; anything else that is missing is an error.
HEADS = {
    "pooler": ("bert.pooler.",),
    "sentence head": ("cls.seq_relationship.",),
    "masked-token head": ("cls.predictions.",),
}
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")  # in old checkpoints; not weights

# our hidden_act → the name of the same function in transformers
_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "swish": "silu", "silu": "silu",
                "tanh": "tanh"}  # fmt: skip
# hidden_act of transformers, including its other names for the same formula → ours
_STOCK_ACTIVATIONS = {theirs: ours for ours, theirs in _ACTIVATIONS.items()} | {
    "swish": "silu", "gelu_new": "gelu_tanh", "gelu_python_tanh": "gelu_tanh", "gelu_python": "gelu"
}  # fmt: skip
_SAME_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "type_vocab_size",
    "initializer_range",
    "layer_norm_eps",
    "pad_token_id",
    "tie_word_embeddings",
)


def is_pre_ln(state_dict: Mapping[str, Tensor]) -> bool:
    """Whether these weights, under our names, belong to a pre-LN model."""
    return _PRE_LN_ONLY in state_dict


def to_hugging_face(state_dict: Mapping[str, Tensor], config: BertConfig) -> tuple[Tensors, dict[str, Any], Tensors]:
    """Our weights → (tensors, content of config.json, extra tensors) of the stock class.

    Padding rows of the vocabulary are left out, so that `vocab_size` there is the size of the tokenizer; the scores of
    tokens are the same. Extra tensors keep our names.
    """
    pre_ln = is_pre_ln(state_dict)
    _refuse_inexpressible(config, pre_ln)
    names = hugging_face_names(config, pre_ln)
    ours = {name: tensor.detach() for name, tensor in state_dict.items()}
    if config.tie_word_embeddings:
        ours.pop(DECODER, None)
    extra = {name: ours.pop(name) for name in list(ours) if pre_ln and _is_extra(name)}
    _check_names(ours, names, "the checkpoint")

    tokens = config.num_tokens
    for name in (WORDS, BIAS, DECODER):
        if name in ours:
            ours[name] = ours[name][:tokens]
    if pre_ln:  # its position ids start at pad_token_id + 1
        ours[POSITIONS] = functional.pad(ours[POSITIONS], (0, 0, config.pad_token_id + 1, 0))
    tensors = {names[name]: tensor.contiguous() for name, tensor in ours.items()}
    if not config.tie_word_embeddings:
        tensors[_decoder_bias(pre_ln)] = tensors[names[BIAS]].clone()
    return tensors, _hugging_face_config(config, pre_ln), extra


def from_hugging_face(
    tensors: Mapping[str, Tensor], config_dict: Mapping[str, Any], extra_tensors: Mapping[str, Tensor] | None = None
) -> tuple[Tensors, BertConfig]:
    """A stock checkpoint → (our weights, our config), the vocabulary padded with zero rows to a multiple of 8.

    A head that is missing from the checkpoint is missing from the result; `pretrained.start_from` handles that.
    """
    config = read_hugging_face_config(config_dict)
    pre_ln = config_dict["model_type"] == "roberta-prelayernorm"
    tensors = _with_current_names(tensors, "roberta_prelayernorm." if pre_ln else "bert.")
    names = hugging_face_names(config, pre_ln)
    theirs = _without_tied_copies(tensors, names, pre_ln, config)
    ours_of = {hugging_face: ours for ours, hugging_face in names.items()}
    pooler = {
        f"roberta_prelayernorm.pooler.dense.{kind}": f"bert.pooler.dense_act.{kind}" for kind in ("weight", "bias")
    }
    ours_of.update(pooler if pre_ln else {})
    present = {ours_of[name] for name in theirs if name in ours_of}
    absent_heads = [prefixes for prefixes in HEADS.values() if not any(name.startswith(prefixes) for name in present)]
    may_lack = {name for name in ours_of.values() if any(name.startswith(prefixes) for prefixes in absent_heads)}
    _check_names(theirs, {name: ours for name, ours in ours_of.items() if ours not in may_lack}, "the stock checkpoint")

    state = {ours_of[name]: tensor for name, tensor in theirs.items()}
    state.update(extra_tensors or {})
    rows = padded_vocab_size(config.num_tokens)
    for name in (WORDS, BIAS, DECODER):
        if name in state:
            if len(state[name]) != config.num_tokens:
                raise UserError(
                    f"{name} has {len(state[name])} rows, but config.json's vocab_size is {config.num_tokens}; "
                    f"they must be equal"
                )
            padding = (0, 0) * (state[name].dim() - 1) + (0, rows - state[name].shape[0])
            state[name] = functional.pad(state[name], padding)
    if pre_ln:
        state[POSITIONS] = state[POSITIONS][config.pad_token_id + 1 :].clone()
    if config.tie_word_embeddings:
        state[DECODER] = state[WORDS]
    return state, config.with_padded_vocab()


def hugging_face_names(config: BertConfig, pre_ln: bool) -> dict[str, str]:
    """Our names → those of the stock class, for all weights that it has, without tied copies."""
    root, head = ("roberta_prelayernorm", "lm_head") if pre_ln else ("bert", "cls.predictions")
    names = {
        f"bert.embeddings.{kind}_embeddings.weight": f"{root}.embeddings.{kind}_embeddings.weight"
        for kind in ("word", "position", "token_type")
    }
    pairs = {"bert.embeddings.LayerNorm": f"{root}.embeddings.LayerNorm"}
    for index in range(config.num_hidden_layers):
        pairs.update(_layer_names(f"bert.encoder.layer.{index}", f"{root}.encoder.layer.{index}", pre_ln))
    if pre_ln:
        pairs["bert.encoder.FinalLayerNorm"] = f"{root}.LayerNorm"
        pairs["cls.predictions.transform.dense_act"] = f"{head}.dense"
        pairs["cls.predictions.transform.LayerNorm"] = f"{head}.layer_norm"
    else:
        pairs["cls.predictions.transform.dense_act"] = f"{head}.transform.dense"
        pairs["cls.predictions.transform.LayerNorm"] = f"{head}.transform.LayerNorm"
        if config.has_sentence_head:
            pairs["bert.pooler.dense_act"] = f"{root}.pooler.dense"
            pairs["cls.seq_relationship"] = "cls.seq_relationship"
    for ours, theirs in pairs.items():
        names[f"{ours}.weight"], names[f"{ours}.bias"] = f"{theirs}.weight", f"{theirs}.bias"
    names[BIAS] = f"{head}.bias"
    if not config.tie_word_embeddings:
        names[DECODER] = f"{head}.decoder.weight"
    return names


def _layer_names(ours: str, theirs: str, pre_ln: bool) -> dict[str, str]:
    """The modules of one block; each has a weight and a bias."""
    pairs = {f"{ours}.attention.self.{part}": f"{theirs}.attention.self.{part}" for part in ("query", "key", "value")}
    pairs[f"{ours}.attention.output.dense"] = f"{theirs}.attention.output.dense"
    pairs[f"{ours}.intermediate.dense_act"] = f"{theirs}.intermediate.dense"
    pairs[f"{ours}.output.dense"] = f"{theirs}.output.dense"
    if pre_ln:
        pairs[f"{ours}.PreAttentionLayerNorm"] = f"{theirs}.attention.LayerNorm"
        pairs[f"{ours}.PostAttentionLayerNorm"] = f"{theirs}.intermediate.LayerNorm"
    else:
        pairs[f"{ours}.attention.output.LayerNorm"] = f"{theirs}.attention.output.LayerNorm"
        pairs[f"{ours}.output.LayerNorm"] = f"{theirs}.output.LayerNorm"
    return pairs


def _hugging_face_config(config: BertConfig, pre_ln: bool) -> dict[str, Any]:
    values = {key: getattr(config, key) for key in _SAME_KEYS}
    shift = config.pad_token_id + 1 if pre_ln else 0
    return values | {
        "architectures": ["RobertaPreLayerNormForMaskedLM" if pre_ln else "BertForPreTraining"],
        "model_type": "roberta-prelayernorm" if pre_ln else "bert",
        "vocab_size": config.num_tokens,
        "hidden_act": _ACTIVATIONS[config.hidden_act],
        "max_position_embeddings": config.max_position_embeddings + shift,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def read_hugging_face_config(config_dict: Mapping[str, Any]) -> BertConfig:
    """Convert the config of a stock BERT (post-LN) or RobertaPreLayerNorm (pre-LN); the vocabulary is not padded."""
    kind = config_dict.get("model_type")
    if kind not in ("bert", "roberta-prelayernorm"):
        raise UserError(
            f"config.json: model_type is {kind!r}, expected 'bert' (post-LN) or 'roberta-prelayernorm' (pre-LN)"
        )
    if config_dict.get("is_decoder") or config_dict.get("add_cross_attention"):
        raise UserError(
            "config.json describes a decoder (is_decoder or add_cross_attention); give the checkpoint of an encoder"
        )
    pre_ln = kind == "roberta-prelayernorm"
    act = config_dict.get("hidden_act", "gelu")
    if act not in _STOCK_ACTIVATIONS:
        raise UserError(f"config.json: hidden_act is {act!r}, expected one of {', '.join(_STOCK_ACTIVATIONS)}")
    if pre_ln and _STOCK_ACTIVATIONS[act] != "gelu":
        raise UserError(
            f"config.json: hidden_act is {act!r}, but the masked-token head of {kind} always computes gelu, and a "
            "model here has one activation for both; give a checkpoint with hidden_act 'gelu'"
        )
    values = {key: config_dict[key] for key in _SAME_KEYS if key in config_dict}
    if values.setdefault("pad_token_id", 1 if pre_ln else 0) is None:
        if pre_ln:
            raise UserError(
                f"config.json: pad_token_id is null, but positions of {kind} are numbered from pad_token_id + 1; "
                "set it to the id of the padding token that the model was trained with"
            )
        del values["pad_token_id"]  # nothing in a post-LN model depends on it
    shift = values["pad_token_id"] + 1 if pre_ln else 0
    return BertConfig.from_dict(
        values
        | {
            "vocab_size": config_dict.get("vocab_size", 50265 if shift else 30522),
            "hidden_act": _STOCK_ACTIVATIONS[act],
            "max_position_embeddings": config_dict.get("max_position_embeddings", 512) - shift,
            "position_embedding_type": config_dict.get("position_embedding_type") or "absolute",
        }
    )


def _refuse_inexpressible(config: BertConfig, pre_ln: bool) -> None:
    obstacles = export_obstacles(config, pre_ln)
    if obstacles:
        listed = "\n".join(f"  - {obstacle}" for obstacle in obstacles)
        raise UserError(f"this model cannot be exported to transformers:\n{listed}")


def export_obstacles(config: BertConfig, pre_ln: bool) -> list[str]:
    """The parts of the model that no stock class computes."""
    found = []
    if config.hidden_act not in _ACTIVATIONS or (pre_ln and config.hidden_act != "gelu"):
        known = "gelu" if pre_ln else ", ".join(_ACTIVATIONS)
        found.append(f"hidden_act {config.hidden_act!r} has no equivalent in the stock class, which has {known}")
    if config.position_embedding_type != "absolute":
        found.append(f"position_embedding_type {config.position_embedding_type!r} has no equivalent in the stock class")
    if not all((config.has_attention_bias, config.has_mlp_bias, config.norm_bias, config.head_bias,
                config.decoder_bias)):  # fmt: skip
        found.append("use_bias false has no equivalent in the stock class, which has all biases")
    if config.attention_window:
        found.append("attention_window has no equivalent in the stock class, whose attention is dense")
    if config.qk_norm or not config.first_attention_norm or config.position_offset:
        found.append("qk_norm, first_attention_norm false and position_offset have no equivalent in the stock class")
    if not config.type_vocab_size:
        found.append("type_vocab_size 0 has no equivalent in the stock class, which has token types")
    if config.pruned_heads:
        found.append("pruned_heads have no equivalent in the stock class")
    if config.is_sparse:
        found.append("sparse attention has no equivalent in the stock class, whose attention is dense")
    if not pre_ln and not config.has_sentence_head:
        found.append("BertForPreTraining needs a pooler and a sentence head, which sentence_head 'none' omits")
    return found


def _is_extra(name: str) -> bool:
    return name.startswith(HEADS["pooler"] + HEADS["sentence head"])


def _decoder_bias(pre_ln: bool) -> str:
    return "lm_head.decoder.bias" if pre_ln else "cls.predictions.decoder.bias"


def _with_current_names(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    """Convert names of old checkpoints (gamma, beta) and of encoders without heads (no prefix) to the current ones."""
    renamed = {}
    has_prefix = any(name.startswith(prefix) for name in tensors)
    for name, tensor in tensors.items():
        if name.endswith(_BUFFERS):
            continue
        current = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        renamed[current if has_prefix else prefix + current] = tensor
    return renamed


def _without_tied_copies(tensors: Tensors, names: Mapping[str, str], pre_ln: bool, config: BertConfig) -> Tensors:
    """Drop the decoder's copies of tied tensors after verifying that they are copies.

    An untied stock head adds the bias of its decoder and ignores the one whose name ours has.
    """
    kept = dict(tensors)
    if not config.tie_word_embeddings:
        if (bias := kept.pop(_decoder_bias(pre_ln), None)) is not None:
            kept[names[BIAS]] = bias
        return kept
    decoder = f"{'lm_head' if pre_ln else 'cls.predictions'}.decoder.weight"
    copies = {_decoder_bias(pre_ln): names[BIAS], decoder: names[WORDS]}
    problems = Problems()
    for copy, original in copies.items():
        tensor = kept.pop(copy, None)
        if tensor is None:
            continue
        if original not in kept:
            kept[original] = tensor
        elif not torch.equal(tensor, kept[original]):
            problems.add(
                f"{copy} differs from {original}, but config.json says that they are tied; "
                'set "tie_word_embeddings": false there if the head has separate weights'
            )
    problems.raise_if_any()
    return kept


def _check_names(found: Iterable[str], expected: Iterable[str], what: str) -> None:
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unknown:
        lines = [f"  missing: {name}" for name in missing] + [f"  unknown: {name}" for name in unknown]
        raise UserError(
            f"the names in {what} are not those of this model ({len(missing)} missing, {len(unknown)} unknown):\n"
            + "\n".join(lines)
        )
