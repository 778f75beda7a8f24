"""Our weights under Hugging Face's names and back: tensors in, tensors out, no files.

Pre-LN is transformers' `RobertaPreLayerNormForMaskedLM`, which has no place for the pooler and the sentence head: these
travel as extra tensors. Post-LN is `BertForPreTraining`.
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
# What a stock checkpoint may lack as a whole; anything else that is missing is an error.
HEADS = {
    "pooler": ("bert.pooler.",),
    "sentence head": ("cls.seq_relationship.",),
    "masked-token head": ("cls.predictions.",),
}
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")  # old checkpoints hold these; they are no weights

# our hidden_act → transformers' name of the same function
_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu", "swish": "silu", "silu": "silu",
                "tanh": "tanh"}  # fmt: skip
# transformers' hidden_act → ours; its other names of a function (the same formula written out) too
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
    """Which of the two models these weights, under our names, belong to."""
    return _PRE_LN_ONLY in state_dict


def to_hugging_face(state_dict: Mapping[str, Tensor], config: BertConfig) -> tuple[Tensors, dict[str, Any], Tensors]:
    """Our weights → (tensors, config.json's content, extra tensors) of the stock class.

    Padding rows of the vocabulary are left out, so `vocab_size` there is the tokenizer's size; scores of the tokens are
    the same. Extra tensors keep our names.
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

    A head that the checkpoint lacks as a whole is lacking in the result too; see `nvidia.pretrained` for what then.
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
    """Our name → the stock class's, for everything it has a place for (tied copies left out)."""
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
    """Modules of one block; each has a weight and a bias."""
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
    """The config of a stock BERT (post-LN) or RobertaPreLayerNorm (pre-LN) model as ours, vocabulary not yet padded."""
    kind = config_dict.get("model_type")
    if kind not in ("bert", "roberta-prelayernorm"):
        raise UserError(
            f"config.json: model_type is {kind!r}, expected 'bert' (post-LN) or 'roberta-prelayernorm' (pre-LN)"
        )
    if config_dict.get("is_decoder") or config_dict.get("add_cross_attention"):
        raise UserError(
            "config.json describes a decoder (is_decoder or add_cross_attention); give an encoder's checkpoint"
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
                f"config.json: pad_token_id is null, but positions of {kind} are numbered from pad_token_id + 1 on; "
                "write there the id of the padding token that the model was trained with"
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
    """What of the model no stock class computes."""
    found = []
    if config.hidden_act not in _ACTIVATIONS or (pre_ln and config.hidden_act != "gelu"):
        known = "gelu" if pre_ln else ", ".join(_ACTIVATIONS)
        found.append(f"hidden_act {config.hidden_act!r} has no equal in the stock class, which knows {known}")
    if config.position_embedding_type != "absolute":
        found.append(f"position_embedding_type {config.position_embedding_type!r} has no equal in the stock class")
    if not config.use_bias:
        found.append("use_bias false has no equal in the stock class")
    if config.pruned_heads:
        found.append("pruned heads have no place in the stock class")
    if config.is_sparse:
        found.append("the stock class attends densely and would compute something else than sparse attention")
    if not pre_ln and not config.has_sentence_head:
        found.append("BertForPreTraining needs a pooler and a sentence head, which sentence_head 'none' leaves out")
    return found


def _is_extra(name: str) -> bool:
    return name.startswith(HEADS["pooler"] + HEADS["sentence head"])


def _decoder_bias(pre_ln: bool) -> str:
    return "lm_head.decoder.bias" if pre_ln else "cls.predictions.decoder.bias"


def _with_current_names(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    """Names of old checkpoints (gamma, beta) and of bare encoders (no prefix) as stock classes write them today."""
    renamed = {}
    has_prefix = any(name.startswith(prefix) for name in tensors)
    for name, tensor in tensors.items():
        if name.endswith(_BUFFERS):
            continue
        current = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        renamed[current if has_prefix else prefix + current] = tensor
    return renamed


def _without_tied_copies(tensors: Tensors, names: Mapping[str, str], pre_ln: bool, config: BertConfig) -> Tensors:
    """Drop the decoder's copies of tied tensors after making sure that they are copies.

    An untied stock head adds its decoder's own bias; the one above it, of which ours has the name, then does nothing.
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
                f"{copy} differs from {original}, though config.json says that they are tied; "
                'set "tie_word_embeddings": false there if the head is meant to have weights of its own'
            )
    problems.raise_if_any()
    return kept


def _check_names(found: Iterable[str], expected: Iterable[str], what: str) -> None:
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unknown:
        lines = [f"  missing: {name}" for name in missing] + [f"  not known: {name}" for name in unknown]
        raise UserError(
            f"{what} does not have the names this model has ({len(missing)} missing, {len(unknown)} not known):\n"
            + "\n".join(lines)
        )
