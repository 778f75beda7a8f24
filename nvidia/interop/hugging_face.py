"""Conversion of our weights to Hugging Face's names and back: tensors in, tensors out, no files.

Only BERT's stock class has a pooler and a sentence head. For the others these are returned as extra tensors.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from common.errors import Problems, UserError
from nvidia.config import BertConfig, padded_vocab_size
from nvidia.interop.families import (
    BIAS,
    DECODER,
    HEADS,
    POSITIONS,
    QKV,
    WORDS,
    Family,
    family_of,
    family_of_type,
    stock_names,
)
from nvidia.interop.stock_config import export_obstacles, from_stock_config, to_stock_config

Tensors = dict[str, Tensor]

_PRE_LN_ONLY = "bert.encoder.FinalLayerNorm.weight"
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")  # in old checkpoints; not weights
_QKV_PARTS = tuple(f"attention.self.{part}." for part in ("query", "key", "value"))


def is_pre_ln(state_dict: Mapping[str, Tensor]) -> bool:
    """Whether these weights, under our names, belong to a pre-LN model."""
    return _PRE_LN_ONLY in state_dict


def to_hugging_face(state_dict: Mapping[str, Tensor], config: BertConfig) -> tuple[Tensors, dict[str, Any], Tensors]:
    """Our weights → (tensors, content of config.json, extra tensors) of the stock class.

    Padding rows of the vocabulary are left out, so that `vocab_size` there is the size of the tokenizer; the scores of
    tokens are the same. Extra tensors keep our names.
    """
    pre_ln = is_pre_ln(state_dict)
    family = family_of(config, pre_ln)
    if obstacles := export_obstacles(config, pre_ln):
        listed = "\n".join(f"  - {obstacle}" for obstacle in obstacles)
        raise UserError(f"this model cannot be exported to transformers:\n{listed}")
    ours = {name: tensor.detach() for name, tensor in state_dict.items()}
    if config.tie_word_embeddings:
        ours.pop(DECODER, None)
    without_place = () if family.has_sentence_head else (HEADS["pooler"], HEADS["sentence head"])
    extra = {name: ours.pop(name) for name in list(ours) if name.startswith(without_place)}
    if family.is_modern:
        ours = _join_qkv(ours)
    names = stock_names(config, family)
    _check_names(ours, names, "the checkpoint")

    tokens = config.num_tokens
    for name in (WORDS, BIAS, DECODER):
        if name in ours:
            ours[name] = ours[name][:tokens]
    if POSITIONS in ours:
        ours[POSITIONS] = ours[POSITIONS][config.position_offset :]
        shift = config.pad_token_id + 1 if family.shifts_positions else 0
        ours[POSITIONS] = functional.pad(ours[POSITIONS], (0, 0, shift, 0))
    tensors = {names[name]: tensor.contiguous() for name, tensor in ours.items()}
    if not config.tie_word_embeddings and family.decoder_bias is not None:
        tensors[family.decoder_bias] = tensors[names[BIAS]].clone()
    return tensors, to_stock_config(config, family), extra


def from_hugging_face(
    tensors: Mapping[str, Tensor], config_dict: Mapping[str, Any], extra_tensors: Mapping[str, Tensor] | None = None
) -> tuple[Tensors, BertConfig]:
    """A stock checkpoint → (our weights, our config), the vocabulary padded with zero rows to a multiple of 8.

    A head that is missing from the checkpoint is missing from the result; `pretrained.start_from` handles that.
    """
    config = from_stock_config(config_dict)
    family = family_of_type(config_dict["model_type"])
    names = stock_names(config, family)
    theirs = _without_tied_copies(_with_current_names(tensors, family), names, family, config)
    ours_of = {stock: ours for ours, stock in names.items()}
    for kind in ("weight", "bias"):  # an encoder may have a pooler though its class with the masked-token head has none
        ours_of.setdefault(f"{family.root}.pooler.dense.{kind}", f"bert.pooler.dense_act.{kind}")
    present = {ours_of[name] for name in theirs if name in ours_of}
    absent = tuple(head for head in HEADS.values() if not any(name.startswith(head) for name in present))
    _check_names(
        theirs, [name for name, ours in ours_of.items() if not ours.startswith(absent)], "the stock checkpoint"
    )

    state = {ours_of[name]: tensor for name, tensor in theirs.items()}
    if family.is_modern:
        state = _split_qkv(state)
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
    if family.shifts_positions:
        state[POSITIONS] = state[POSITIONS][config.pad_token_id + 1 :].clone()
    if config.tie_word_embeddings:
        state[DECODER] = state[WORDS]
    return state, config.with_padded_vocab()


def _join_qkv(ours: Tensors) -> Tensors:
    """Queries, keys and values as one matrix, in this order."""
    joined = {name: tensor for name, tensor in ours.items() if not any(part in name for part in _QKV_PARTS)}
    first, *_ = _QKV_PARTS
    for name in ours:
        if first in name:
            parts = [ours[other] for other in (name.replace(first, part) for part in _QKV_PARTS) if other in ours]
            joined[name.replace(first, f"{QKV}.")] = torch.cat(parts)
    return joined


def _split_qkv(joined: Tensors) -> Tensors:
    state = {name: tensor for name, tensor in joined.items() if f"{QKV}." not in name}
    for name in joined.keys() - state.keys():
        for part, tensor in zip(_QKV_PARTS, joined[name].chunk(3), strict=True):
            state[name.replace(f"{QKV}.", part)] = tensor.clone()
    return state


def _with_current_names(tensors: Mapping[str, Tensor], family: Family) -> Tensors:
    """Convert names of old checkpoints (gamma, beta) and of encoders without heads (no prefix) to the current ones."""
    renamed, prefix = {}, f"{family.root}."
    has_prefix = any(name.startswith(prefix) for name in tensors)
    for name, tensor in tensors.items():
        if name.endswith(_BUFFERS):
            continue
        current = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        renamed[current if has_prefix else prefix + current] = tensor
    return renamed


def _without_tied_copies(tensors: Tensors, names: Mapping[str, str], family: Family, config: BertConfig) -> Tensors:
    """Drop the decoder's copies of tied tensors after verifying that they are copies.

    An untied stock head adds the bias of its decoder and ignores the one whose name ours has.
    """
    kept = dict(tensors)
    if not config.tie_word_embeddings:
        if family.decoder_bias is not None and (bias := kept.pop(family.decoder_bias, None)) is not None:
            kept[names[BIAS]] = bias
        return kept
    copies = {family.decoder: names[WORDS]}
    if family.decoder_bias is not None:
        copies[family.decoder_bias] = names[BIAS]
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
