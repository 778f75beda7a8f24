"""Start pretraining from existing weights: what must match, what may be missing, how the vocabulary is adapted."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional

from common.errors import Problems, UserError
from nvidia.config import BertConfig
from nvidia.interop.families import BIAS, DECODER, HEADS, POSITIONS, WORDS
from nvidia.interop.hugging_face import Tensors, is_pre_ln
from nvidia.pretraining import PreTrainingModel

_SHAPE_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "type_vocab_size",
               "max_position_embeddings", "hidden_act", "position_embedding_type", "attention_window", "qk_norm",
               "first_attention_norm", "norm_bias", "head_bias", "decoder_bias", "tie_word_embeddings",
               "layer_norm_eps")  # fmt: skip
# Keys that others stand in for where they are not set: the property with the value in use.
_RESOLVED_KEYS = {"attention_bias": "has_attention_bias", "mlp_bias": "has_mlp_bias"}


def start_from(model: PreTrainingModel, state: Mapping[str, Tensor], config: BertConfig) -> list[str]:
    """Load weights (under our names, with their config) into `model`; return notes for the user.

    Every weight must match, with two exceptions. A head that is missing from the checkpoint keeps its initialization.
    In the vocabulary, token i keeps row i, tokens that only the model has keep their initialized rows, and tokens that
    only the checkpoint has are dropped. So both must have the same tokenizer for the tokens they share.
    """
    _check_shapes(model, state, config)
    state, notes = _fit_vocabulary(model, dict(state), config)
    if POSITIONS in state and model.config.position_offset:
        state[POSITIONS] = functional.pad(state[POSITIONS], (0, 0, model.config.position_offset, 0))
    expected = model.state_dict()
    notes += _keep_fresh_heads(expected, state, model.config.tie_word_embeddings)
    absent = tuple(head for head in HEADS.values() if not any(name.startswith(head) for name in expected))
    ignored = sorted(name for name in state if name.startswith(absent))
    if ignored:
        notes.append(f"the checkpoint has a head that this model does not have; ignored: {', '.join(ignored)}")
    state = {name: tensor for name, tensor in state.items() if name not in ignored}
    _check_tensors(expected, state)
    model.load_state_dict(state)
    return notes


def _check_shapes(model: PreTrainingModel, state: Mapping[str, Tensor], config: BertConfig) -> None:
    problems = Problems()
    if is_pre_ln(state) != model.bert.pre_ln:
        kinds = {True: "pre-LN", False: "post-LN"}
        problems.add(
            f"the checkpoint is {kinds[is_pre_ln(state)]}, but the model is {kinds[model.bert.pre_ln]}; use the kind "
            "of the checkpoint"
        )
    for key, (theirs, ours) in _shapes(config, model.config).items():
        if theirs != ours and {theirs, ours} != {"swish", "silu"}:  # two names of one function
            problems.add(f"the checkpoint's {key} is {theirs!r}, but the model JSON says {ours!r}; make them equal")
    problems.raise_if_any()


def _shapes(theirs: BertConfig, ours: BertConfig) -> dict[str, tuple[Any, Any]]:
    """Key → its value in both, for all keys that matter to these models."""
    found = {key: (getattr(theirs, key), getattr(ours, key)) for key in _SHAPE_KEYS}
    found |= {key: (getattr(theirs, name), getattr(ours, name)) for key, name in _RESOLVED_KEYS.items()}
    if theirs.is_rotary and ours.is_rotary:
        found.pop("max_position_embeddings")  # there is no table
        found["rope_theta"] = (theirs.rope_theta, ours.rope_theta)
    layers = range(theirs.num_hidden_layers)
    if theirs.attention_window == ours.attention_window != 0 and theirs.num_hidden_layers == ours.num_hidden_layers:
        if any(theirs.window(layer) != ours.window(layer) for layer in layers):
            found["global_attention_every"] = (theirs.global_attention_every, ours.global_attention_every)
        elif theirs.is_rotary and ours.is_rotary and any(theirs.rope_base(n) != ours.rope_base(n) for n in layers):
            found["local_rope_theta"] = (theirs.local_rope_theta, ours.local_rope_theta)
    return found


def _fit_vocabulary(model: PreTrainingModel, state: Tensors, config: BertConfig) -> tuple[Tensors, list[str]]:
    ours, theirs = model.config.num_tokens, config.num_tokens
    shared, own = min(ours, theirs), model.state_dict()
    for name in (WORDS, BIAS, DECODER):
        if name in state and name in own and state[name].shape[1:] == own[name].shape[1:]:
            table = own[name].detach().clone()
            table[:shared] = state[name][:shared].to(table)
            state[name] = table
    if ours == theirs:
        return state, []
    kept = f"the checkpoint has {theirs} tokens and the tokenizer {ours}: tokens 0 … {shared - 1} keep their weights, "
    if ours > theirs:
        return state, [kept + f"tokens {theirs} … {ours - 1} are newly initialized"]
    return state, [kept + f"tokens {ours} … {theirs - 1} are dropped"]


def _keep_fresh_heads(expected: Mapping[str, Tensor], state: Tensors, is_tied: bool) -> list[str]:
    """Fill in heads that are missing from `state` with the newly initialized weights of the model."""
    notes = []
    if is_tied and WORDS in state:
        state.setdefault(DECODER, state[WORDS])
    for head, prefix in HEADS.items():
        own = {name: tensor for name, tensor in expected.items() if name.startswith(prefix) and name not in state}
        if own and not any(name.startswith(prefix) and name != DECODER for name in state):
            state.update(own)
            notes.append(f"the checkpoint has no {head}; it is newly initialized")
    return notes


def _check_tensors(expected: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    lines = [f"  missing: {name}" for name in sorted(expected.keys() - state.keys())]
    lines += [f"  unknown: {name}" for name in sorted(state.keys() - expected.keys())]
    for name in sorted(expected.keys() & state.keys()):
        theirs, ours = list(state[name].shape), list(expected[name].shape)
        if theirs != ours:
            lines.append(f"  wrong shape: {name} is {theirs}, expected {ours}")
    if lines:
        raise UserError("the weights of the checkpoint do not match this model:\n" + "\n".join(lines))
