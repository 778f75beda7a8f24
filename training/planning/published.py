"""Throughput that others have published, and what the formulas predict for the same model, data and machines.

The efficiencies of A100 and H100 in the table come from the two MPT-7B rows. docs/planning.md says which properties of
the other rows' implementations were chosen with their figures in view.
"""

from dataclasses import dataclass, replace

from nvidia.config import BertConfig
from training.planning.accelerators import Cluster, read_table
from training.planning.estimate import Configuration, Estimate, estimate
from training.planning.memory import ZeroSettings
from training.planning.workload import Execution, PlannedModel, RowLengths

NVIDIA = "NVIDIA DeepLearningExamples, BERT for PyTorch, 21.11"
MOSAIC = "MosaicML llm-foundry, scripts/train/benchmarking"
ETTIN = "Ettin, arXiv 2507.11412"


@dataclass(frozen=True)
class Published:
    """One published figure. `divide_by` is the run that a strong scaling is relative to."""

    label: str
    unit: str
    value: float
    source: str
    config: BertConfig
    lengths: RowLengths
    accelerator: str
    gpus: tuple[int, int]  # per node, nodes
    configuration: Configuration
    is_calibration: bool = False
    divide_by: "Published | None" = None

    def predict(self) -> float:
        found = self._estimate()
        if self.unit == "rows/s":
            return found.rows_per_second
        if self.unit == "tokens/s per GPU":
            return found.tokens_per_second / found.world_size
        assert self.divide_by is not None
        return found.rows_per_second / self.divide_by._estimate().rows_per_second

    def _estimate(self) -> Estimate:
        cluster = Cluster(read_table()[self.accelerator], *self.gpus)
        model = PlannedModel(self.config, self.lengths, self.configuration.execution.is_pre_ln)
        return estimate(model, cluster, self.configuration)

    @property
    def error(self) -> float:
        """Relative: 0.1 is 10 % too fast."""
        return self.predict() / self.value - 1


def _bert_large() -> BertConfig:
    return BertConfig(
        vocab_size=30528, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )


def _nvidia(
    label: str,
    value: float,
    *,
    width: int,
    mean: float | None = None,
    precision: str = "fp16",
    accelerator: str = "A100-80",
    gpus: tuple[int, int] = (1, 1),
    micro: int,
    accumulation: int,
) -> Published:
    """Post-LN with fused norms and attention written out as fused pieces, LAMB, gradients all-reduced once a step."""
    masked = {128: 20.0, 512: 80.0}[width]
    tokens = mean or width
    execution = Execution(precision, "cuda", "plain", has_fused_norm=True, is_pre_ln=False, shortens_last_block=False)
    return Published(
        label=label,
        unit="rows/s",
        value=value,
        source=NVIDIA,
        config=_bert_large(),
        lengths=RowLengths(round(tokens), tokens, tokens**2, masked * tokens / width),
        accelerator=accelerator,
        gpus=gpus,
        configuration=Configuration(micro, accumulation, ZeroSettings(0, optimizer="lamb"), execution),
    )


def _nvidia_32_nodes(value: float, accumulation: int, one_node: Published) -> Published:
    """How many times as fast as one node 32 nodes are, at the same global batch."""
    return replace(
        one_node,
        label=f"{one_node.label}, 32 nodes over 1",
        unit="times",
        value=value,
        gpus=(one_node.gpus[0], 32),
        configuration=replace(one_node.configuration, accumulation=accumulation),
        divide_by=one_node,
    )


def _mpt(name: str, accelerator: str, value: float, micro: int, accumulation: int) -> Published:
    """A decoder with fused attention and norms, no biases and no dropout, that predicts every token; ZeRO-3 (FSDP)."""
    hidden, layers, heads = {
        "125M": (768, 12, 12),
        "350M": (1024, 24, 16),
        "760M": (1536, 24, 12),
        "1B": (2048, 24, 16),
        "7B": (4096, 32, 32),
    }[name]
    config = BertConfig(
        vocab_size=50368,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=2048,
        use_bias=False,
        sentence_head="none",
    )
    execution = Execution("bf16", "cuda", "varlen", has_fused_norm=True)
    zero = ZeroSettings(3, overlaps=True, max_live_parameters=10**9)
    return Published(
        label=f"MPT-{name}, 2048, bf16, 8 × {accelerator}",
        unit="tokens/s per GPU",
        value=value,
        source=MOSAIC,
        config=config,
        lengths=RowLengths(2048, 2048, 2048**2, 2048),
        accelerator=accelerator,
        gpus=(8, 1),
        configuration=Configuration(micro, accumulation, zero, execution),
        is_calibration=name == "7B",
    )


def _ettin() -> Published:
    """ModernBERT's architecture: fused attention, 30 % masked tokens, packed rows."""
    config = BertConfig(
        vocab_size=50368,
        hidden_size=768,
        num_hidden_layers=22,
        num_attention_heads=12,
        intermediate_size=1152,
        hidden_act="geglu",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=1024,
        type_vocab_size=0,
        position_embedding_type="rotary",
        attention_window=128,
        global_attention_every=3,
        use_bias=False,
        norm_bias=False,
        head_bias=False,
        sentence_head="none",
    )
    return Published(
        label="Ettin 150M, 1024, bf16, H100",
        unit="tokens/s per GPU",
        value=295_000,
        source=ETTIN,
        config=config,
        lengths=RowLengths(1024, 1024, 1024**2, 307),
        accelerator="H100",
        gpus=(4, 1),
        configuration=Configuration(
            64,
            4,
            ZeroSettings(0),
            Execution("bf16", "cuda", "varlen", has_fused_norm=True, shortens_last_block=False),
        ),
    )


def published_figures() -> list[Published]:
    """Calibration rows first."""
    large = "BERT-large"
    node_128 = _nvidia(f"{large}, 128, fp16", 4553, width=128, gpus=(8, 1), micro=256, accumulation=32)
    node_512 = _nvidia(f"{large}, 512, fp16", 1648, width=512, gpus=(8, 1), micro=32, accumulation=128)
    return [
        _mpt("7B", "A100-80", 4641, 6, 2),
        _mpt("7B", "H100", 10643, 6, 1),
        _nvidia(f"{large}, 128, fp16, A100", 580, width=128, micro=256, accumulation=32),
        _nvidia(f"{large}, 512 (full rows), fp16, A100", 210, width=512, micro=32, accumulation=128),
        _nvidia(f"{large}, 512 (half padding), fp16, A100", 210, width=512, mean=256, micro=32, accumulation=128),
        _nvidia(f"{large}, 128, TF32, A100", 317, width=128, precision="tf32", micro=128, accumulation=64),
        _nvidia(f"{large}, 128, fp16, V100", 224, width=128, accelerator="V100-32", micro=64, accumulation=64),
        _nvidia(f"{large}, 128, fp16, 8 × A100", 4591, width=128, gpus=(8, 1), micro=256, accumulation=32),
        _nvidia_32_nodes(30.37, 1, node_128),
        _nvidia_32_nodes(30.13, 4, node_512),
        _ettin(),
        _mpt("125M", "A100-80", 142_830, 40, 2),
        _mpt("350M", "A100-80", 58_782, 32, 2),
        _mpt("760M", "A100-80", 32_434, 24, 2),
        _mpt("1B", "A100-80", 20_513, 14, 4),
        _mpt("760M", "H100", 63_147, 24, 2),
        _mpt("1B", "H100", 45_455, 14, 1),
    ]
