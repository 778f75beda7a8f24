"""TensorBoard's event files of a run."""

import re
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from training.metrics.charts import LAYOUT, RESULTS, Chart, charts_of


class Board:
    """Writes the charts of charts.py. `with_details`: also timer sections, and every chart by samples."""

    def __init__(self, folder: Path, *, num_ranks: int, with_details: bool) -> None:
        self.folder, self.num_ranks, self.with_details = folder, num_ranks, with_details
        self.step_writer: SummaryWriter | None = None
        self.sample_writer: SummaryWriter | None = None

    def open(self, step: int | None, samples: int | None) -> None:
        """Open the files, and purge what earlier ones contain from `step` and `samples` on; None: nothing.

        Figures by samples have a separate folder, because TensorBoard purges all figures of a folder.
        """
        self.close()
        self.step_writer = SummaryWriter(str(self.folder), purge_step=step)
        self.step_writer.add_custom_scalars(
            {
                category: {
                    title: ["Multiline", [f"{re.escape(chart.tag)}$" for chart in charts]]
                    for title, charts in panels.items()
                }
                for category, panels in LAYOUT.items()
            }
        )
        if self.with_details:
            self.sample_writer = SummaryWriter(f"{self.folder}/by_samples", purge_step=samples)

    def close(self) -> None:
        writers = self.step_writer, self.sample_writer
        self.abandon()
        for writer in writers:
            if writer is not None:
                writer.close()

    def abandon(self) -> None:
        """Forget the open files, whose threads an error has ended. The next write opens new ones."""
        self.step_writer = self.sample_writer = None

    def scalars(self, kind: str, step: int, samples: int, figures: dict[str, float]) -> None:
        charts = charts_of(kind, num_ranks=self.num_ranks, with_details=self.with_details, keys=figures)
        chosen = {chart: figures[key] for key, chart in charts.items() if key in figures}
        writer = self._writer()
        for chart, value in chosen.items():
            _add(writer, chart, value, step)
            if self.sample_writer is not None:
                _add(self.sample_writer, chart._replace(tag=by_samples(chart.tag)), value, samples)
        writer.flush()
        if self.sample_writer is not None:
            self.sample_writer.flush()

    def _writer(self) -> SummaryWriter:
        if self.step_writer is None:
            self.open(None, None)
        assert self.step_writer is not None
        return self.step_writer

    def text(self, name: str, content: str, step: int | None) -> None:
        self._writer().add_text(name, content, step)

    def histogram(self, name: str, values: Tensor, step: int) -> None:
        self._writer().add_histogram(name, values, step)

    def table_of_runs(self, hyperparameters: dict[str, Any], recorded: set[str]) -> None:
        """Add the run to the HParams tab. Its results are the last values of charts, which have no second copy.

        `recorded`: tags of the charts that this run has values of.
        """
        results = {chart.tag: 0.0 for chart in RESULTS if chart.tag in recorded}
        plain = {key: value for key, value in hyperparameters.items() if isinstance(value, bool | int | float | str)}
        for summary in hparams(plain, results):
            self._writer()._get_file_writer().add_summary(summary)


def by_samples(tag: str) -> str:
    group, _, name = tag.partition("/")
    return f"{group}_by_samples/{name}"


def _add(writer: SummaryWriter, chart: Chart, value: float, step: int) -> None:
    """Write a scalar as SummaryWriter.add_scalar() does, with a description."""
    metadata = SummaryMetadata(summary_description=chart.description)
    metadata.plugin_data.plugin_name = "scalars"
    value_of_tag = Summary.Value(tag=chart.tag, simple_value=float(value), metadata=metadata)
    writer._get_file_writer().add_summary(Summary(value=[value_of_tag]), step)
