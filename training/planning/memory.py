"""Memory of one rank: states and buffers for each ZeRO stage, as DeepSpeed 0.19 allocates them, and activations.

B rows, S padded length, T real tokens, U used tokens, M masked tokens, H hidden size, I intermediate size, V tokens,
A heads, P parameters, N ranks, e bytes of a parameter or an activation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nvidia.config import BertConfig
from training.planning.compute import leaves_queries_out
from training.planning.workload import BYTES, Batch, Execution, ParameterCount, wide_size

MASTER = 4  # bytes of a master weight, and of an element of optimizer state
STATISTICS = 8  # bytes per row of a layer norm: mean and deviation in fp32
ALL_REDUCE_ELEMENTS = 500_000_000  # gradients that DeepSpeed flattens at a time at stage 0
# Tensors of optimizer state per parameter. Muon keeps one for the encoder's matrices and two for the others.
OPTIMIZER_STATES = {"adam": 2, "adamw": 2, "lamb": 2, "muon": 2, "lion": 1, "adagrad": 1, "muadam": 2, "muadamw": 2}


@dataclass(frozen=True)
class ZeroSettings:
    """The settings of the DeepSpeed JSON that decide memory and communication. Sizes have its names and defaults."""

    stage: int
    optimizer: str = "adamw"
    is_amsgrad: bool = False
    offloads_optimizer: bool = False
    offloads_parameters: bool = False
    overlaps: bool = False
    reduce_bucket_size: int = 500_000_000  # elements
    allgather_bucket_size: int = 500_000_000
    is_contiguous: bool = True
    reduces_to_owners: bool = False  # use_multi_rank_bucket_allreduce false: half of an all-reduce's traffic
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000
    stage3_param_persistence_threshold: int = 100_000
    accumulates_in_fp32: bool = False

    @classmethod
    def of(cls, content: Mapping[str, Any], stage: int | None = None) -> "ZeroSettings":
        """The settings of a checked DeepSpeed JSON, for its own or for another stage."""
        zero, optimizer = content.get("zero_optimization", {}), content.get("optimizer", {})
        stage = int(zero.get("stage", 0)) if stage is None else stage
        overlaps = zero.get("overlap_comm")
        sizes = {item.name: int(zero[item.name]) for item in fields(cls) if item.name in zero and item.name != "stage"}
        return cls(
            stage=stage,
            optimizer=str(optimizer.get("type", "AdamW")).lower(),
            is_amsgrad=bool(optimizer.get("params", {}).get("amsgrad", False)),
            offloads_optimizer=_is_offloaded(zero, "offload_optimizer") and stage > 0,
            offloads_parameters=_is_offloaded(zero, "offload_param") and stage == 3,
            overlaps=stage == 3 if overlaps is None else bool(overlaps) and stage > 0,
            is_contiguous=bool(zero.get("contiguous_gradients", True)),
            reduces_to_owners=zero.get("use_multi_rank_bucket_allreduce") is False and zero.get("reduce_scatter", True),
            accumulates_in_fp32=str(content.get("data_types", {}).get("grad_accum_dtype", "")).endswith("32"),
            **sizes,
        )


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. `host` is what offloading puts into the machine's memory instead."""

    weights: float
    master_weights: float
    gradients: float
    optimizer: float
    buffers: float  # of reductions, and what the optimizer step needs for a moment
    activations: float = 0.0
    workspace: float = 0.0  # temporaries of the loss and of the backward pass
    host: float = 0.0

    @property
    def states(self) -> float:
        return self.weights + self.master_weights + self.gradients + self.optimizer

    @property
    def peak(self) -> float:
        """The most bytes on the device. Buffers of the step and activations are counted together: an upper limit."""
        return self.states + self.buffers + self.activations + self.workspace

    def parts(self) -> dict[str, float]:
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "host"}


def estimate_states(parameters: ParameterCount, precision: str, zero: ZeroSettings, world_size: int) -> Memory:
    """All that does not depend on the batch. Gradients count whole, though they appear as activations go."""
    total, size, stage = parameters.total, BYTES[precision], zero.stage
    share = total / world_size if stage > 0 else total
    optimizer = MASTER * _optimizer_elements(parameters, zero) / (world_size if stage > 0 else 1)
    master = MASTER * share if size < MASTER or stage > 0 else 0.0
    weights = size * total if stage < 3 else size * (share + parameters.small(zero.stage3_param_persistence_threshold))
    gradient_size = MASTER if zero.accumulates_in_fp32 and stage > 1 else size
    gradients = size * total if stage < 2 else gradient_size * share
    buffers, host = _buffers(parameters, size, zero, share), 0.0
    if zero.offloads_optimizer:
        host = master + optimizer + MASTER * share + size * share
        master, optimizer, buffers = 0.0, 0.0, _bucket(parameters, size, zero)
    if zero.offloads_parameters:
        host += size * share
        weights -= size * share
    return Memory(weights, master, gradients, optimizer, buffers, host=host)


def _buffers(parameters: ParameterCount, size: int, zero: ZeroSettings, share: float) -> float:
    """The larger of the two moments: gradients are reduced during the backward pass, the step comes after it."""
    is_half = size < MASTER
    if zero.stage == 0:
        flattened = size * min(parameters.total, ALL_REDUCE_ELEMENTS)
        return max(flattened, MASTER * parameters.total if is_half else 0)
    step = (MASTER + size if is_half else size) * share  # the partition's gradient, flat and in fp32
    gathered = 0.0
    if zero.stage == 3:
        step = (MASTER if is_half else 0) * share
        gathered_elements = parameters.total - parameters.small(zero.stage3_param_persistence_threshold)
        gathered = size * min(gathered_elements, zero.stage3_max_live_parameters)
    return max(_bucket(parameters, size, zero) + gathered, step)


def _bucket(parameters: ParameterCount, size: int, zero: ZeroSettings) -> float:
    """DeepSpeed allocates whole buckets, however small the model is, and two where reductions overlap."""
    if not zero.is_contiguous:
        return size * min(parameters.total, zero.reduce_bucket_size)
    twice = 2 if zero.overlaps and zero.stage < 3 else 1
    return float(size * zero.reduce_bucket_size * twice)


def _optimizer_elements(parameters: ParameterCount, zero: ZeroSettings) -> int:
    states = OPTIMIZER_STATES.get(zero.optimizer, 2) + (1 if zero.is_amsgrad else 0)
    saved_by_muon = parameters.encoder_matrices if zero.optimizer == "muon" else 0
    return states * parameters.total - saved_by_muon


def _is_offloaded(zero: Mapping[str, Any], key: str) -> bool:
    block = zero.get(key)
    return isinstance(block, Mapping) and block.get("device", "none") != "none"


def estimate_activations(config: BertConfig, batch: Batch, execution: Execution) -> tuple[float, float]:
    """Bytes that a forward pass stores for the backward pass, and the largest temporary beside them."""
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
        return stored, max(loss_workspace, layer_workspace - head)
    boundary = execution.bytes * config.hidden_size * batch.tokens  # a chunk's input
    chunks = -(-layers // chunk)
    stored = embeddings + chunks * boundary + head
    in_last = layers - (chunks - 1) * chunk
    recomputed = [(chunks, (in_last - 1) * full + last)] + [(index, chunk * full) for index in range(chunks - 1, 0, -1)]
    at_backward = max(embeddings + kept * boundary + inner + layer_workspace for kept, inner in recomputed)
    return stored, max(loss_workspace, at_backward - stored)


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
    is_some = used is not None and leaves_queries_out(config, batch, execution)
    # Keys and values of sdpa with few queries are padded.
    kept_keys = batch.padded_tokens if execution.backend == "sdpa" else tokens
    projected = inner * execution.bytes * (rows_out + 2 * kept_keys if is_some else 3 * tokens)
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
        # Two numbers per softmax; its context, if that is not what the next product reads.
        kept_context = 0 if used is None else inner * e
        return (batch.used if is_some else batch.tokens) * (8 * heads + kept_context)
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
    has_factor = is_gated and not execution.has_compiled_gelu(config)
    activated = 0.0 if choice.activation else rows * config.intermediate_size * e * (1 + has_factor)
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
