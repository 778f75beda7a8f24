"""Memory of activations: what the forward pass stores for the backward pass, and what exists for a moment only.

B rows, S padded length, T real tokens, U used tokens, M masked tokens, H hidden size, I intermediate size, V tokens,
A heads, e bytes of an activation.
"""

from dataclasses import dataclass

from nvidia.config import BertConfig
from training.planning.compute import leaves_queries_out
from training.planning.workload import Batch, Execution, wide_size

STATISTICS = 8  # bytes per row of a layer norm: mean and deviation in fp32


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes. `stored` lives from the forward to the backward pass, `workspace` is the largest temporary beside it."""

    stored: float
    workspace: float


def estimate_activations(config: BertConfig, batch: Batch, execution: Execution) -> ActivationMemory:
    """Estimate the activations of one micro-step on one rank."""
    layers, chunk = config.num_hidden_layers, execution.checkpointing.layers
    halves = [_attention_half(config, batch, execution, layer) for layer in range(max(1, layers - 1))]
    full = sum(halves) / len(halves) + _wide_half(config, batch.tokens, execution)
    last = _attention_half(config, batch, execution, layers - 1, batch.used) + _wide_half(config, batch.used, execution)
    head = _head(config, batch, execution)
    embeddings = _embeddings(config, batch, execution)
    logits = batch.masked * config.num_tokens
    # While the loss is computed its scores exist in the model's type and in fp32, beside their stored log-softmax.
    loss_workspace = logits * (4 + (execution.bytes if execution.bytes < 4 else 0))
    layer_workspace = _backward_workspace(config, batch, execution)
    if not chunk:
        stored = embeddings + (layers - 1) * full + last + head
        return ActivationMemory(stored, max(loss_workspace, layer_workspace - head))
    boundary = execution.bytes * config.hidden_size * batch.tokens  # a chunk's input
    chunks = -(-layers // chunk)
    stored = embeddings + chunks * boundary + head
    in_last = layers - (chunks - 1) * chunk
    recomputed = [(chunks, (in_last - 1) * full + last)] + [(index, chunk * full) for index in range(chunks - 1, 0, -1)]
    at_backward = max(embeddings + kept * boundary + inner + layer_workspace for kept, inner in recomputed)
    return ActivationMemory(stored, max(loss_workspace, at_backward - stored))


def _norm(config: BertConfig, rows: float, execution: Execution) -> float:
    """A layer norm's input and output. In half precision ours keeps an fp32 copy of the input."""
    kept = execution.bytes if execution.has_fused_norm else 4
    return rows * (config.hidden_size * (kept + execution.bytes) + STATISTICS)


def _stream(config: BertConfig, rows: float, execution: Execution) -> float:
    """The residual stream alone: what a recomputed norm keeps."""
    return rows * config.hidden_size * execution.bytes


def _attention_half(
    config: BertConfig, batch: Batch, execution: Execution, layer: int, used: float | None = None
) -> float:
    """Bytes stored up to the input of attention's output projection; `used` rows leave the last block."""
    execution = execution.in_layer(config, layer, batch.lengths.width)
    choice, tokens = execution.checkpointing, batch.tokens
    has_norm = execution.is_pre_ln and (layer > 0 or config.first_attention_norm)
    keeps_stream = choice.norm or not has_norm  # a post-LN block begins with the product itself
    norm = (_stream if keeps_stream else _norm)(config, tokens, execution)
    inner = config.num_heads(layer) * config.head_size
    rows_out = tokens if used is None else used
    dropout = rows_out * config.hidden_size if config.hidden_dropout_prob and execution.keeps_masks else 0
    is_some = used is not None and execution.backend == "sdpa" and leaves_queries_out(config, batch, execution)
    # Keys and values of sdpa with few queries are padded.
    projected = inner * execution.bytes * (rows_out + 2 * batch.padded_tokens if is_some else 3 * tokens)
    if config.qk_norm:  # the norms keep their input in fp32 and the input divided by its size
        kinds = 3 if execution.bytes == 4 else 2  # in fp32 values are part of the same tensor
        projected += inner * tokens * 4 * (2 + kinds)
        if is_some:
            projected -= inner * (tokens - rows_out) * 4 * 2
    context = rows_out * inner * execution.bytes
    internals = 0.0 if choice.attention else _attention_internals(config, batch, execution, inner, used, is_some)
    return norm + projected + internals + context + dropout


def _attention_internals(
    config: BertConfig, batch: Batch, execution: Execution, inner: int, used: float | None, is_some: bool
) -> float:
    """What the attention backend itself stores beyond its input and the packed context."""
    e, heads = execution.bytes, inner // config.head_size
    if execution.backend == "grouped":
        return 0.0
    if execution.backend in ("varlen", "flex", "jagged"):
        copied = 3 if execution.backend == "jagged" else 0
        selected = batch.tokens * inner * e if used is not None else 0  # all rows' context, of which some are taken
        return batch.tokens * (4 * heads + copied * inner * e) + selected
    if execution.backend == "sdpa" and not execution.pads_attention:
        return (batch.used if is_some else batch.tokens) * (inner * e + 4 * heads)
    padded = batch.padded_tokens
    stored = padded * 3 * inner * e
    if execution.backend == "sdpa":
        return stored + padded * (inner * e + 4 * heads)
    scores = batch.padded_pairs * heads
    has_dropout = config.attention_probs_dropout_prob > 0
    per_score = 4 + (e if has_dropout or e < 4 else 0) + (1 if has_dropout and execution.keeps_masks else 0)
    return stored + scores * per_score  # probabilities in fp32, after dropout, and its mask


def _wide_half(config: BertConfig, rows: float, execution: Execution) -> float:
    """The feed-forward part of a block, on `rows`."""
    choice, e = execution.checkpointing, execution.bytes
    is_recomputed = choice.norm and execution.is_pre_ln
    norm = (_stream if is_recomputed else _norm)(config, rows, execution)
    wide = rows * wide_size(config) * e
    second_norm = 0.0 if execution.is_pre_ln else _norm(config, rows, execution) - _stream(config, rows, execution)
    is_gated = wide_size(config) > config.intermediate_size
    # The activation's output, and of a gated one the first factor.
    activated = 0.0 if choice.activation else rows * config.intermediate_size * e * (2 if is_gated else 1)
    dropout = rows * config.hidden_size if config.hidden_dropout_prob and execution.keeps_masks else 0
    return norm + wide + activated + dropout + second_norm


def _embeddings(config: BertConfig, batch: Batch, execution: Execution) -> float:
    kept = execution.bytes if execution.has_fused_norm else 4
    mask = config.hidden_size if config.hidden_dropout_prob and execution.keeps_masks else 0
    indices = 3 * 8
    bases = {config.rope_base(layer) for layer in range(config.num_hidden_layers)} if config.is_rotary else ()
    rotations = 4 * config.head_size * len(bases)  # cosines and sines, shared by the layers
    return batch.tokens * (config.hidden_size * kept + STATISTICS + mask + indices + rotations)


def _head(config: BertConfig, batch: Batch, execution: Execution) -> float:
    """The final norm, both heads and the log-softmax, which is fp32 in every precision."""
    e, hidden = execution.bytes, config.hidden_size
    final_norm = _norm(config, batch.used, execution) if execution.is_pre_ln else batch.used * hidden * e
    transform = batch.masked * (hidden * e) + _norm(config, batch.masked, execution)
    pooler = batch.rows * hidden * e if config.has_sentence_head else 0
    return final_norm + transform + pooler + 4 * batch.masked * config.num_tokens


def _backward_workspace(config: BertConfig, batch: Batch, execution: Execution) -> float:
    """Gradients that exist at once while a block's feed-forward part goes backward."""
    return batch.tokens * execution.bytes * (2 * wide_size(config) + 3 * config.hidden_size)
