"""TensorBoard's event files of a run, and its charts: their order, units, and layout on the Custom Scalars tab.

TensorBoard sorts groups (the part of a tag before "/") by name: probe, train, validation, watch_health, watch_speed,
watch_time.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from training.metrics.timing import SECTIONS


class Chart(NamedTuple):
    tag: str
    description: str  # with the unit


def _charts(groups: dict[str, dict[str, str]]) -> dict[str, Chart]:
    """Key of metrics.jsonl → chart, from group → key → description."""
    return {key: Chart(f"{group}/{key}", text) for group, texts in groups.items() for key, text in texts.items()}


NATS = "nats, mean over the steps since the last report"
ACCURACIES = {
    "mlm_accuracy": "share of masked tokens predicted correctly, 0 to 1",
    "nsp_accuracy": "share of sentence pairs classified correctly, 0 to 1",
}
LOSSES = {
    "loss": "masked-LM loss plus sentence loss",
    "mlm_loss": "cross entropy of masked tokens",
    "nsp_loss": "cross entropy of sentence pairs",
}
SECTION_NOTES = {f"seconds_{name}": "seconds since the last report, mean over ranks" for name in (*SECTIONS, "other")}
TRAIN = _charts(
    {
        "train": {
            **{key: f"{text}; {NATS}" for key, text in LOSSES.items()},
            **ACCURACIES,
            "tokens_per_second": "real tokens (without padding) per second, all ranks",
        },
        "watch_health": {
            "epoch": "passes over the data so far",
            "grad_norm": "norm of the last step's gradient, before clipping",
            "loss_scale": "fp16 loss scale",
            "masking_rate": "masked tokens as a share of real tokens, 0 to 1",
            "memory_gib": "GiB: peak memory so far, of the rank with the most",
            "padding_share": "padding as a share of all positions, 0 to 1",
            "skipped_steps": "steps skipped so far: overflow, or not finite",
            "tokens": "real tokens so far",
        },
        "watch_speed": {
            "data_wait_share": "share of the time spent waiting for data, 0 to 1",
            "matmul_share": "the model's FLOP/s over those of plain matrix products, 0 to 1",
            "model_flops_per_second": "FLOP/s that the model needs, all ranks",
            "samples_per_second": "rows per second, all ranks",
            "seconds_per_step": "seconds, without validation and checkpoints",
            "slowest_over_fastest_rank": "time for the same work, a ratio",
            "slowest_rank": "number of the slowest rank",
        },
        "watch_time": {"window_steps": "steps in this report", **SECTION_NOTES},
    }
) | {"learning_rate": Chart("train/lr", "learning rate of the last step")}
LOSSES_IN_NATS = {key: f"{text}; nats" for key, text in LOSSES.items()}
VALIDATION = _charts({"validation": {**LOSSES_IN_NATS, **ACCURACIES, "perplexity": "exp(masked-LM loss)"}})
PROBE_NOTE = "score of a task without fine-tuning: accuracy from 0 to 1, or a correlation from -1 to 1"

# The Custom Scalars tab: category → title → keys, whose charts of training and validation are drawn into one.
LAYOUT = {
    "loss": {
        "loss (nats)": ["loss"],
        "masked-LM loss (nats)": ["mlm_loss"],
        "masked-LM accuracy": ["mlm_accuracy"],
        "learning rate": ["learning_rate"],
    },
    "speed": {
        "real tokens per second": ["tokens_per_second"],
        "seconds per step": ["seconds_per_step"],
        "data wait and matmul speed, as shares": ["data_wait_share", "matmul_share"],
    },
    "health": {
        "gradient norm": ["grad_norm"],
        "skipped steps": ["skipped_steps"],
        "peak memory (GiB)": ["memory_gib"],
        "loss scale (fp16)": ["loss_scale"],
    },
}
# The columns of the table of runs (HParams): its figures are the last values of these charts.
RESULTS = (
    *(("validation", key, VALIDATION[key]) for key in ("mlm_loss", "mlm_accuracy", "nsp_accuracy", "perplexity")),
    *(("train", key, TRAIN[key]) for key in ("mlm_loss", "mlm_accuracy", "tokens", "tokens_per_second")),
)


def charts_of(kind: str, *, num_ranks: int, with_details: bool, keys: Iterable[str] = ()) -> dict[str, Chart]:
    """The charts of lines of `kind` ("train", "validation" or "probe"), by key. Probes have those of their `keys`.

    Figures of ranks are shown with several ranks, and `watch_time` with details.
    """
    if kind == "validation":
        return VALIDATION
    if kind == "probe":
        return _charts({"probe": dict.fromkeys(keys, PROBE_NOTE)})
    return {
        key: chart
        for key, chart in TRAIN.items()
        if (num_ranks > 1 or not key.endswith("_rank")) and (with_details or not chart.tag.startswith("watch_time/"))
    }


class Board:
    """Writes the charts. `with_details`: also timer sections, and every chart by samples."""

    def __init__(self, folder: Path, *, num_ranks: int, with_details: bool) -> None:
        self.folder, self.num_ranks, self.with_details = folder, num_ranks, with_details
        self.writers: list[SummaryWriter] = []  # by step, and with details by samples

    def open(self, step: int | None, samples: int | None) -> None:
        """Open the files, and purge what earlier ones contain from `step` and `samples` on; None: nothing.

        Figures by samples have a separate folder, because TensorBoard purges all figures of a folder.
        """
        self.close()
        self.writers = [SummaryWriter(str(self.folder), purge_step=step)]
        layout = {
            category: {title: ["Multiline", _patterns(keys)] for title, keys in panels.items()}
            for category, panels in LAYOUT.items()
        }
        self.writers[0].add_custom_scalars(layout)
        if self.with_details:
            self.writers.append(SummaryWriter(f"{self.folder}/by_samples", purge_step=samples))

    def close(self) -> None:
        writers = self.writers
        self.abandon()
        for writer in writers:
            writer.close()

    def abandon(self) -> None:
        """Forget the open files, whose threads an error has ended. The next write opens new ones."""
        self.writers = []

    def writer(self) -> SummaryWriter:
        if not self.writers:
            self.open(None, None)
        return self.writers[0]

    def scalars(self, kind: str, step: int, samples: int, figures: dict[str, float]) -> None:
        charts = charts_of(kind, num_ranks=self.num_ranks, with_details=self.with_details, keys=figures)
        self.writer()
        for writer, position, suffix in zip(self.writers, (step, samples), ("", "_by_samples"), strict=False):
            for key in figures.keys() & charts.keys():
                group, _, name = charts[key].tag.partition("/")
                metadata = SummaryMetadata(summary_description=charts[key].description)
                metadata.plugin_data.plugin_name = "scalars"
                # As SummaryWriter.add_scalar() does, with a description.
                value = Summary.Value(
                    tag=f"{group}{suffix}/{name}", simple_value=float(figures[key]), metadata=metadata
                )
                writer._get_file_writer().add_summary(Summary(value=[value]), position)
            writer.flush()

    def table_of_runs(self, hyperparameters: dict[str, Any], rows: Iterable[dict[str, Any]]) -> None:
        """Add the run to the HParams tab. Its results are the last values of charts, which have no second copy.

        `rows`: the lines of metrics.jsonl, also of earlier processes: a chart without a value has no column.
        """
        recorded = {(row.get("kind"), key) for row in rows for key in row}
        results = {chart.tag: 0.0 for kind, key, chart in RESULTS if (kind, key) in recorded}
        plain = {key: value for key, value in hyperparameters.items() if isinstance(value, bool | int | float | str)}
        for summary in hparams(plain, results):
            self.writer()._get_file_writer().add_summary(summary)


def _patterns(keys: Iterable[str]) -> list[str]:
    return [f"{re.escape(charts[key].tag)}$" for key in keys for charts in (TRAIN, VALIDATION) if key in charts]
