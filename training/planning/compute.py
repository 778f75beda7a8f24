"""Time of one micro-step and of the optimizer step on one device: products by FLOPs, everything else by bytes moved.

B rows, S padded length, T real tokens, U used tokens, M masked tokens, H hidden size, I intermediate size, V tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from nvidia.attention.backend import WINDOW_QUERIES
from nvidia.config import BertConfig
from training.planning.accelerators import Accelerator
from training.planning.workload import Batch, Execution, wide_size

BACKWARD_PRODUCTS = 2  # of a linear layer: for its input and for its weight
# Products of attention in the backward pass, in forwards: fused kernels compute the scores again.
FUSED_ATTENTION_BACKWARD = 2.5
PLAIN_ATTENTION_BACKWARD = 2.0
MIN_SKIPPED_SCORES = 1 << 16  # of a batch: from here on `grouped` attention skips queries whose results are not used
# Kernels of a block in eager PyTorch, forward and backward, and of embeddings, heads and loss; a test counts them.
KERNELS_PER_LAYER = 60
KERNELS_OUTSIDE = 128
# Host time of a micro-step with ZeRO-3's hooks around every module, in host times without them (docs/planning.md).
ZERO3_HOST_TIME = 2.2
# Bytes that the optimizer step moves per parameter it updates: the norm and unscaling of the gradient, the gradient,
# two moments and the weight read, moments and weight written, and in half precision the casts of both.
OPTIMIZER_BYTES = {4: 40, 2: 54}


@dataclass(frozen=True)
class Product:
    """`count` products [rows, inner] · [inner, columns] of a forward pass."""

    part: str  # projection, attention, output, wide, narrow (the feed-forward part's two), or head
    rows: float
    inner: float
    columns: float
    count: float = 1.0

    @property
    def is_attention(self) -> bool:
        """Scores, or their product with the values: of activations, not of a weight."""
        return self.part == "attention"

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inner * self.columns * self.count

    def bytes(self, size: int) -> float:
        moved = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        return size * moved * self.count


@dataclass(frozen=True)
class MicroStep:
    """Seconds of a micro-step's parts."""

    product_seconds: float
    memory_seconds: float
    launch_seconds: float  # of the host, during which the device computes

    @property
    def device_seconds(self) -> float:
        return self.product_seconds + self.memory_seconds

    @property
    def seconds(self) -> float:
        return max(self.device_seconds, self.launch_seconds)


def estimate_micro_step(
    config: BertConfig, batch: Batch, execution: Execution, accelerator: Accelerator, zero_stage: int = 0
) -> MicroStep:
    """Forward and backward of one micro-batch on one device."""
    speed, bandwidth = accelerator.matmul_flops(execution.precision), accelerator.streaming_bytes_per_s
    seconds = 0.0
    for product in forward_products(config, batch, execution):
        # A fused attention kernel reads and writes its scores nowhere.
        moved = 0.0 if product.is_attention else product.bytes(execution.bytes)
        seconds += num_passes(product, execution) * max(product.flops / speed, moved / bandwidth)
    hooks = ZERO3_HOST_TIME if zero_stage == 3 else 1.0
    return MicroStep(
        product_seconds=seconds,
        memory_seconds=traffic(config, batch, execution) / bandwidth,
        launch_seconds=accelerator.launch_seconds * count_kernels(config, execution) * hooks,
    )


def optimizer_seconds(parameters: float, precision_bytes: int, accelerator: Accelerator) -> float:
    """Seconds to update that many parameters, once per step."""
    return parameters * OPTIMIZER_BYTES[precision_bytes] / accelerator.streaming_bytes_per_s


def count_kernels(config: BertConfig, execution: Execution) -> float:
    recomputed = 1 / 3 if execution.checkpointing.layers else 0.0
    return config.num_hidden_layers * KERNELS_PER_LAYER * (1 + recomputed) + KERNELS_OUTSIDE


def forward_products(config: BertConfig, batch: Batch, execution: Execution) -> Iterator[Product]:
    hidden, layers = config.hidden_size, config.num_hidden_layers
    last = batch.used if execution.shortens_last_block else batch.tokens
    for rows, count in ((batch.tokens, layers - 1), (last, 1)):
        if count:
            yield Product("output", rows, hidden, hidden, count)
            yield Product("wide", rows, hidden, wide_size(config), count)
            yield Product("narrow", rows, config.intermediate_size, hidden, count)
    pairs = batch.padded_pairs if execution.pads_attention else batch.pairs
    some = leaves_queries_out(config, batch, execution)
    full_layers = layers - 1 if some else layers
    yield Product("projection", batch.tokens, hidden, 3 * hidden, full_layers)
    width = batch.lengths.width
    num_windows = sum(execution.has_own_window(config, layer, width) for layer in range(full_layers))
    if num_windows < full_layers:
        yield Product("attention", pairs, hidden, 1, 2 * (full_layers - num_windows))
    if num_windows:
        # These backends compute what the window hides, too.
        is_padded = (execution.window_backend or execution.backend) in ("plain", "sdpa")
        windowed = batch.padded_pairs if is_padded else batch.windowed_pairs(config.attention_window)
        yield Product("attention", windowed, hidden, 1, 2 * num_windows)
    if some:
        yield Product("projection", batch.used, hidden, hidden)
        yield Product("projection", batch.tokens, hidden, 2 * hidden)
        window = config.window(layers - 1)
        if execution.in_layer(config, layers - 1, width).backend == "sdpa":  # pads keys to one length
            keys = float(width)
        else:  # with a window, the queries of a tile are far from each other
            keys = min(pairs / batch.tokens, WINDOW_QUERIES * batch.tokens / batch.used + (window or math.inf))
        yield Product("attention", batch.used * keys, hidden, 1, 2)
    yield Product("head", batch.masked, hidden, hidden)
    yield Product("head", batch.masked, hidden, config.vocab_size)
    if config.has_sentence_head:
        yield Product("head", batch.rows, hidden, hidden)
        yield Product("head", batch.rows, hidden, 2)


def leaves_queries_out(config: BertConfig, batch: Batch, execution: Execution) -> bool:
    """Whether the last block's attention computes the used queries alone."""
    if execution.device != "cpu" or 2 * batch.used > batch.tokens:
        return False
    backend = execution.in_layer(config, config.num_hidden_layers - 1, batch.lengths.width).backend
    scores = config.num_attention_heads * batch.lengths.mean_square * batch.rows
    return backend == "sdpa" or (backend == "grouped" and scores >= MIN_SKIPPED_SCORES)


def num_passes(product: Product, execution: Execution) -> float:
    """How often a micro-step computes a product: forward, backward, and again where it is recomputed."""
    if not product.is_attention:
        backward: float = BACKWARD_PRODUCTS
    else:
        backward = PLAIN_ATTENTION_BACKWARD if execution.backend == "plain" else FUSED_ATTENTION_BACKWARD
    return 1 + backward + _recomputed_share(product, execution)


def _recomputed_share(product: Product, execution: Execution) -> float:
    """Forward passes of this product that the backward pass repeats."""
    choice = execution.checkpointing
    if product.part == "head":
        return 0.0
    if choice.layers:
        # Recomputation ends before a chunk's last product.
        return 1.0 - 1 / choice.layers if product.part == "narrow" else 1.0
    # Recomputation of a norm ends before the wide product. Queries, keys and values come from one function of our own,
    # and what such a function keeps is known only after it has run.
    repeats_projection = choice.norm and execution.is_pre_ln and product.part == "projection"
    return float(repeats_projection or (choice.attention and product.is_attention))


def traffic(config: BertConfig, batch: Batch, execution: Execution) -> float:
    """Bytes that kernels other than products read and write in a micro-step, forward and backward."""
    layers = config.num_hidden_layers
    last = batch.used if execution.shortens_last_block else batch.tokens
    blocks = sum(
        _attention_traffic(
            config,
            batch,
            execution.in_layer(config, layer, batch.lengths.width),
            last if layer == layers - 1 else batch.tokens,
            batch.windowed_pairs(config.attention_window) if config.window(layer) else batch.pairs,
        )
        for layer in range(layers)
    )
    wide = (layers - 1) * batch.tokens + last
    blocks += wide * _wide_traffic(config, execution)
    if execution.checkpointing.layers:
        blocks *= 4 / 3  # a third of it is the forward pass, which is repeated
    return blocks + _outside_traffic(config, batch, execution)


def _norm_bytes(config: BertConfig, execution: Execution) -> float:
    """Bytes of a layer norm per row: read, write; backward reads twice for its input and twice for its weights."""
    fused = 7 * execution.bytes
    casts = 0 if execution.has_fused_norm else 40  # to fp32 and back, in both directions, and fp32 kernels
    return config.hidden_size * (fused + casts)


def _residual_bytes(config: BertConfig, execution: Execution) -> float:
    """Bytes of the end of a branch per row: dropout, sum, their backward, the sum of both branches' gradients."""
    dropout = (4 * execution.bytes + 2) if config.hidden_dropout_prob else 0
    num_biased = config.has_attention_bias + config.has_mlp_bias  # of the two branches
    return config.hidden_size * (6 * execution.bytes + dropout + execution.bytes * num_biased / 2)


def _attention_traffic(config: BertConfig, batch: Batch, execution: Execution, rows: float, pairs: float) -> float:
    e, hidden = execution.bytes, config.hidden_size
    bias = 3 * hidden * e * batch.tokens if config.has_attention_bias else 0
    around = batch.tokens * _norm_bytes(config, execution) + rows * _residual_bytes(config, execution) + bias
    if config.is_rotary:  # queries and keys are read, rotated in fp32 and written, in both directions
        around += batch.tokens * 2 * hidden * (4 * e + 32)
    fused = 12 * hidden * e * batch.tokens  # read q, k, v, write; backward reads five and writes three of this size
    if execution.backend == "plain":
        # Written by the product, masked, softmax in fp32, cast, dropped and read again; backward as much.
        per_score = 24 if execution.has_fused_norm else 60
        return around + fused + config.num_attention_heads * batch.padded_pairs * per_score
    if execution.backend == "grouped":  # scores are in a cache: what the loops over them take, in bytes of memory
        return around + fused + config.num_attention_heads * pairs * 16
    if execution.pads_attention:  # unpack, and pack the context, in both directions
        return around + fused + 16 * hidden * e * batch.padded_tokens
    return around + fused


def _wide_traffic(config: BertConfig, execution: Execution) -> float:
    """Bytes of the feed-forward part per row."""
    e, inner = execution.bytes, config.intermediate_size
    is_gated = wide_size(config) > inner
    # Of a gated activation: gelu, product, their backward, both halves joined.
    activation = inner * e * (17 if is_gated else 5)
    bias = wide_size(config) * e if config.has_mlp_bias else 0
    if execution.has_compiled_gelu(config):  # with the bias: read and write, read twice and write
        activation, bias = inner * e * (8 if is_gated else 5), 0
    again = inner * e * 2 if execution.checkpointing.activation else 0
    return _norm_bytes(config, execution) + _residual_bytes(config, execution) + activation + bias + again


def _outside_traffic(config: BertConfig, batch: Batch, execution: Execution) -> float:
    """Embeddings, and the loss: scores cast to fp32, log-softmax, and back."""
    e, hidden = execution.bytes, config.hidden_size
    embeddings = batch.tokens * (10 * hidden * e + _norm_bytes(config, execution))
    per_score = 20 + (12 if e < 4 else 0)
    return embeddings + batch.masked * (config.num_tokens * per_score + _norm_bytes(config, execution))
