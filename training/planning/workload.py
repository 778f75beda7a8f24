"""What a micro-step computes: the model, the rows of a micro-batch, and how the model runs on a device.

B rows, S padded length, T real tokens, U used tokens (first and masked ones), M masked tokens, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from nvidia.activations import is_gated
from nvidia.attention.backend import WINDOW_QUERIES, is_wide_window
from nvidia.attention.registry import choose_backend
from nvidia.checkpointing import Checkpointing
from nvidia.config import BertConfig
from nvidia.cpu.gelu import GATED
from nvidia.modeling import BertForPreTraining
from nvidia.modelingpreln import BertForPreTrainingPreLN
from nvidia.self_attention import training_context
from training.metrics.flops import model_flops
from training.optimizers.build import hidden_matrices
from training.runtime.precision import DTYPES

BYTES = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2}
NOTHING = Checkpointing()  # is recomputed
_DTYPES = {**DTYPES, "tf32": torch.float32}


@dataclass(frozen=True)
class RowLengths:
    """What is known of the data: a row's padded length, and means over rows."""

    width: int  # S
    mean: float  # real tokens per row
    mean_square: float  # of real tokens per row: attention's work
    mean_masked: float  # predictions per row

    @classmethod
    def of(cls, width: int, lengths: Sequence[float], mean_masked: float) -> "RowLengths":
        count = len(lengths)
        return cls(width, sum(lengths) / count, sum(length * length for length in lengths) / count, mean_masked)


@dataclass(frozen=True)
class Batch:
    """A micro-batch of `rows` average rows; the other sizes follow."""

    rows: int  # B
    lengths: RowLengths

    def heaviest(self) -> "Batch":
        """The same rows with three standard deviations more tokens: what memory must hold."""
        given = self.lengths
        spread = max(0.0, given.mean_square - given.mean**2) ** 0.5
        mean = min(float(given.width), given.mean + 3 * spread / self.rows**0.5)
        ratio = mean / given.mean
        heavier = RowLengths(given.width, mean, given.mean_square * ratio**2, given.mean_masked * ratio)
        return replace(self, lengths=heavier)

    @property
    def tokens(self) -> float:
        return self.rows * self.lengths.mean

    @property
    def padded_tokens(self) -> float:
        return float(self.rows * self.lengths.width)

    @property
    def masked(self) -> float:
        return self.rows * self.lengths.mean_masked

    @property
    def used(self) -> float:
        return min(self.rows + self.masked, self.tokens)

    @property
    def pairs(self) -> float:
        """Query-key pairs within the real rows."""
        return self.rows * self.lengths.mean_square

    @property
    def padded_pairs(self) -> float:
        return self.rows * float(self.lengths.width) ** 2

    def windowed_pairs(self, window: int) -> float:
        """Pairs that are computed with a window: tiles of queries see keys of which each query hides some."""
        return min(self.pairs, self.tokens * (window + WINDOW_QUERIES))


@dataclass(frozen=True)
class Execution:
    """How the model's operations run: they decide what is computed, stored and moved."""

    precision: str
    device: str
    backend: str  # of attention
    has_fused_norm: bool  # one kernel in the parameters' type; ours casts to fp32 and back in half precision
    is_pre_ln: bool = True
    checkpointing: Checkpointing = NOTHING
    shortens_last_block: bool = True  # ours computes the last block's feed-forward part for used tokens only
    window_backend: str | None = None  # of attention in layers with a window; None: the same

    @property
    def bytes(self) -> int:
        """Bytes of an element of an activation."""
        return BYTES[self.precision]

    @property
    def keeps_masks(self) -> bool:
        """Dropout on a CPU draws its mask again in the backward pass."""
        return self.device != "cpu"

    def has_compiled_gelu(self, config: BertConfig) -> bool:
        """Whether a loop computes the activation together with its bias, in one pass each way."""
        return self.device == "cpu" and self.precision == "fp32" and config.hidden_act in GATED

    @property
    def pads_attention(self) -> bool:
        return self.backend == "plain" or (self.backend == "sdpa" and self.device != "cpu")

    def has_own_window(self, config: BertConfig, layer: int, width: int) -> bool:
        """Whether that layer's attention has a window that makes a difference in rows of this width."""
        window = config.window(layer)
        return window > 0 and not (self.device == "cpu" and is_wide_window(window, width))

    def in_layer(self, config: BertConfig, layer: int, width: int) -> "Execution":
        """The same with the backend of that layer."""
        is_other = self.has_own_window(config, layer, width)
        return replace(self, backend=self.window_backend or self.backend) if is_other else self


def plan_execution(
    config: BertConfig,
    precision: str,
    device: str,
    capability: tuple[int, int] | None,
    is_pre_ln: bool = True,
    checkpointing: Checkpointing = NOTHING,
) -> Execution:
    """How this project's model runs on a device."""
    context = training_context(config, device, _DTYPES[precision], capability)
    return Execution(
        precision=precision,
        device=device,
        backend=choose_backend(config.attention_backend, context._replace(has_window=False)),
        window_backend=choose_backend(config.attention_backend, context),
        has_fused_norm=BYTES[precision] == 4,
        is_pre_ln=is_pre_ln,
        checkpointing=checkpointing,
    )


def wide_size(config: BertConfig) -> int:
    """Columns of the first feed-forward product: a gate doubles them."""
    return config.intermediate_size * (2 if is_gated(config.hidden_act) else 1)


@dataclass(frozen=True)
class ParameterCount:
    total: int
    encoder_matrices: int  # what Muon updates
    sizes: tuple[int, ...]  # of each parameter

    def small(self, threshold: int) -> int:
        """Elements of all parameters below ZeRO-3's persistence threshold."""
        return sum(size for size in self.sizes if size < threshold)


def count_parameters(config: BertConfig, is_pre_ln: bool = True) -> ParameterCount:
    """Every trainable parameter of the pretraining model, which is built without memory."""
    with torch.device("meta"):
        model = (BertForPreTrainingPreLN if is_pre_ln else BertForPreTraining)(config)
    sizes = tuple(parameter.numel() for parameter in model.parameters())
    return ParameterCount(sum(sizes), sum(matrix.numel() for matrix in hidden_matrices(model)), sizes)


class PlannedModel:
    """A model and its rows, with what follows from them computed once: plans compare thousands of configurations."""

    def __init__(self, config: BertConfig, lengths: RowLengths, is_pre_ln: bool = True) -> None:
        self.config, self.lengths, self.is_pre_ln = config, lengths, is_pre_ln
        self.flops_per_row = flops_per_row(config, lengths)
        self.flops_per_token = self.flops_per_row / lengths.mean
        self.parameters = count_parameters(config, is_pre_ln)


def flops_per_row(config: BertConfig, lengths: RowLengths) -> float:
    """Model FLOPs of an average row, forward and backward: the figure that runs report as their useful work."""
    # Two rows whose lengths have this mean and this mean square stand for all of them.
    spread = max(0.0, lengths.mean_square - lengths.mean**2) ** 0.5
    pair = torch.tensor([lengths.mean - spread, lengths.mean + spread], dtype=torch.float64)
    return model_flops(config, pair, num_masked=round(2e6 * lengths.mean_masked) / 1e6) / 2  # type: ignore[arg-type]
