"""Throughput that others have published, and what the formulas predict for the same model, data and machines.

The efficiencies of A100 and H100 in the table come from the two MPT-7B rows. docs/planning.md names the sources, and
says which properties of the other rows' implementations were chosen with their figures in view.
"""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from nvidia.config import BertConfig
from training.planning.accelerators import Cluster, read_table
from training.planning.estimate import Configuration, Estimate, estimate
from training.planning.memory import ZeroSettings
from training.planning.workload import Execution, PlannedModel, RowLengths

MPT_SIZES = {  # hidden size, layers, heads
    "125M": (768, 12, 12),
    "350M": (1024, 24, 16),
    "760M": (1536, 24, 12),
    "1B": (2048, 24, 16),
    "7B": (4096, 32, 32),
}
# Fused attention and norms, no biases, no dropout, no sentence head: MPT and ModernBERT.
LEAN: dict[str, Any] = {
    "vocab_size": 50368,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "use_bias": False,
    "sentence_head": "none",
}
LEAN_EXECUTION = Execution("bf16", "cuda", "varlen", has_fused_norm=True)


@dataclass(frozen=True)
class Published:
    """One published figure. `divide_by` is the run that a strong scaling is relative to."""

    label: str
    unit: str
    value: float
    model: PlannedModel
    cluster: Cluster
    configuration: Configuration
    is_calibration: bool = False
    divide_by: "Published | None" = None

    @cached_property
    def estimate(self) -> Estimate:
        return estimate(self.model, self.cluster, self.configuration)

    @property
    def predicted(self) -> float:
        if self.divide_by is not None:
            return self.estimate.rows_per_second / self.divide_by.estimate.rows_per_second
        if self.unit == "rows/s":
            return self.estimate.rows_per_second
        return self.estimate.tokens_per_second / self.estimate.world_size

    @property
    def error(self) -> float:
        """Relative: 0.1 is 10 % too fast."""
        return self.predicted / self.value - 1


def _bert_large(width: int, masked: float) -> PlannedModel:
    config = BertConfig(
        vocab_size=30528, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    return PlannedModel(config, RowLengths(width, width, width**2, masked), is_pre_ln=False)


def _nvidia(
    label: str, value: float, model: PlannedModel, accelerator: str, gpus: int, batch: tuple[int, int], precision: str
) -> Published:
    """Post-LN with fused norms and attention written out as fused pieces, LAMB, gradients all-reduced once a step."""
    execution = Execution(precision, "cuda", "plain", has_fused_norm=True, is_pre_ln=False, shortens_last_block=False)
    configuration = Configuration(*batch, ZeroSettings(0, optimizer="lamb"), execution)
    cluster = Cluster(read_table()[accelerator], gpus)
    return Published(f"BERT-large, {label}", "rows/s", value, model, cluster, configuration)


def _over_one_node(value: float, accumulation: int, one_node: Published) -> Published:
    """How many times as fast as one node 32 nodes are, at the same global batch."""
    return replace(
        one_node,
        label=f"{one_node.label}, 32 nodes over 1",
        unit="times",
        value=value,
        cluster=replace(one_node.cluster, nodes=32),
        configuration=replace(one_node.configuration, accumulation=accumulation),
        divide_by=one_node,
    )


def _mpt(name: str, accelerator: str, value: float, micro: int, accumulation: int) -> Published:
    """A decoder that predicts every token; ZeRO-3 (FSDP)."""
    hidden, layers, heads = MPT_SIZES[name]
    config = BertConfig(
        **LEAN,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        max_position_embeddings=2048,
    )
    return Published(
        label=f"MPT-{name}, 2048, bf16, 8 × {accelerator}",
        unit="tokens/s per GPU",
        value=value,
        model=PlannedModel(config, RowLengths(2048, 2048, 2048**2, 2048)),
        cluster=Cluster(read_table()[accelerator], 8),
        configuration=Configuration(micro, accumulation, ZeroSettings(3, overlaps=True), LEAN_EXECUTION),
        is_calibration=name == "7B",
    )


def _ettin() -> Published:
    """ModernBERT's architecture: 30 % masked tokens, packed rows."""
    config = BertConfig(
        **LEAN,
        hidden_size=768,
        num_hidden_layers=22,
        num_attention_heads=12,
        intermediate_size=1152,
        hidden_act="geglu",
        max_position_embeddings=1024,
        type_vocab_size=0,
        position_embedding_type="rotary",
        attention_window=128,
        global_attention_every=3,
        norm_bias=False,
        head_bias=False,
    )
    return Published(
        label="Ettin 150M, 1024, bf16, H100",
        unit="tokens/s per GPU",
        value=295_000,
        model=PlannedModel(config, RowLengths(1024, 1024, 1024**2, 307)),
        cluster=Cluster(read_table()["H100"], 4),
        configuration=Configuration(64, 4, ZeroSettings(0), replace(LEAN_EXECUTION, shortens_last_block=False)),
    )


@cache
def published_figures() -> list[Published]:
    """Calibration rows first."""
    short, long, half = _bert_large(128, 20.0), _bert_large(512, 80.0), _bert_large(256, 40.0)
    return [
        _mpt("7B", "A100-80", 4641, 6, 2),
        _mpt("7B", "H100", 10643, 6, 1),
        _nvidia("128, fp16, A100", 580, short, "A100-80", 1, (256, 32), "fp16"),
        _nvidia("512 (full rows), fp16, A100", 210, long, "A100-80", 1, (32, 128), "fp16"),
        _nvidia("512 (half padding), fp16, A100", 210, half, "A100-80", 1, (32, 128), "fp16"),
        _nvidia("128, TF32, A100", 317, short, "A100-80", 1, (128, 64), "tf32"),
        _nvidia("128, fp16, V100", 224, short, "V100-32", 1, (64, 64), "fp16"),
        _nvidia("128, fp16, 8 × A100", 4591, short, "A100-80", 8, (256, 32), "fp16"),
        _over_one_node(30.37, 1, _nvidia("128, fp16", 4553, short, "A100-80", 8, (256, 32), "fp16")),
        _over_one_node(30.13, 4, _nvidia("512, fp16", 1648, long, "A100-80", 8, (32, 128), "fp16")),
        _ettin(),
        _mpt("125M", "A100-80", 142_830, 40, 2),
        _mpt("350M", "A100-80", 58_782, 32, 2),
        _mpt("760M", "A100-80", 32_434, 24, 2),
        _mpt("1B", "A100-80", 20_513, 14, 4),
        _mpt("760M", "H100", 63_147, 24, 2),
        _mpt("1B", "H100", 45_455, 14, 1),
    ]


def published_table() -> list[str]:
    """The Markdown table of docs/planning.md."""
    lines = ["| run | unit | published | predicted | error |", "|---|---|---:|---:|---:|"]
    for figure in published_figures():
        label = f"{figure.label} (calibration)" if figure.is_calibration else figure.label
        figures = [f"{value:,.0f}" if value >= 100 else f"{value:.1f}" for value in (figure.value, figure.predicted)]
        lines.append(f"| {label} | {figure.unit} | {' | '.join(figures)} | {figure.error:+.0%} |")
    return lines
