"""Figures in TensorBoard and in the CSV monitor, read back."""

import json
import re
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from common.files import append_whole
from tests.rank_server import RankServer
from tests.support import VOCAB, read_metrics, write_project
from tests.unit.training.in_process import run_here
from training.metrics.board import charts_of
from training.metrics.sinks import Sinks, without_writer_tracebacks

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat", "on", "paris", "is", "capital", "of", "."]


def write_vocab(folder: Path) -> None:
    words = [*WORDS, *(f"word{index}" for index in range(VOCAB - len(WORDS)))]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    words = write_project(folder)
    write_vocab(folder)
    path = folder / "model.json"
    path.write_text(path.read_text().replace('"name": "tiny"', '"name": "tiny", "bert_token_file": "vocab.txt"'))
    run_here([*words, "--max_steps", "4", "--validate_every_steps", "2", "--log_histograms"])
    return folder


@pytest.fixture(scope="module")
def events(finished: Path) -> Any:
    return read_events(finished)


def read_events(folder: Path) -> Any:
    sizes = {"tensors": 0, "scalars": 0, "histograms": 0}
    return EventAccumulator(str(folder / "out" / "runs" / "tiny"), size_guidance=sizes).Reload()


def test_tensorboard_opens_on_what_matters(events: Any) -> None:
    """TensorBoard sorts groups and tags by name."""
    tags = sorted(events.Tags()["scalars"])
    assert len(tags) < 30
    assert tags[:4] == ["train/loss", "train/lr", "train/mlm_accuracy", "train/mlm_loss"]
    groups = sorted({tag.split("/")[0] for tag in tags})
    assert groups == ["train", "validation", "watch_health", "watch_speed"]
    assert {"train/tokens_per_second", "validation/loss", "validation/mlm_accuracy"} <= set(tags)
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]
    assert [event.step for event in events.Scalars("validation/perplexity")] == [2, 4]
    assert not (Path(events.path) / "by_samples").exists()
    assert not [tag for tag in tags if "rank" in tag]  # there is one rank


def test_every_chart_says_its_unit(events: Any) -> None:
    descriptions = {tag: events.SummaryMetadata(tag).summary_description for tag in events.Tags()["scalars"]}
    assert all(descriptions.values())
    assert descriptions["train/loss"].endswith("nats, mean over the steps since the last report")
    assert descriptions["watch_health/memory_gib"].startswith("GiB")


def test_every_figure_has_a_chart_with_details_and_several_ranks(finished: Path) -> None:
    figures = read_metrics(finished, "train")[-1].keys() - {"kind", "step", "samples", "time"}
    charts = charts_of("train", num_ranks=2, with_details=True)
    assert figures <= charts.keys()
    assert charts.keys() - figures == {"loss_scale"}  # fp16 only
    without = charts_of("train", num_ranks=2, with_details=False)
    assert len(without) + len(charts_of("validation", num_ranks=2, with_details=False)) < 30


def test_the_custom_layout_names_charts_that_exist(events: Any) -> None:
    (event,) = events.Tensors("custom_scalars__config__")
    layout = Layout.FromString(event.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == ["loss", "speed", "health"]
    patterns = [tag for category in layout.category for chart in category.chart for tag in chart.multiline.tag]
    tags = events.Tags()["scalars"]
    unmatched = [pattern for pattern in patterns if not any(re.match(pattern, tag) for tag in tags)]
    assert unmatched == ["watch_health/loss_scale$"]  # fp16 only


def test_curves_by_samples_on_request(tmp_path: Path) -> None:
    sinks = Sinks(tmp_path, True, 0, 0, num_ranks=2, with_details=True)
    sinks.record("train", 5, 40, {"loss": 3.0, "seconds_forward": 0.5, "slowest_rank": 1.0})
    sinks.close()
    events = EventAccumulator(str(tmp_path / "by_samples")).Reload()
    tags = ["train_by_samples/loss", "watch_speed_by_samples/slowest_rank", "watch_time_by_samples/seconds_forward"]
    assert sorted(events.Tags()["scalars"]) == tags
    assert [event.step for event in events.Scalars(tags[0])] == [40]


def test_guesses_and_configs(events: Any) -> None:
    tags = events.Tags()["tensors"]
    guesses = events.Tensors("guesses/text_summary")
    assert [event.step for event in guesses] == [2, 4]
    table = guesses[0].tensor_proto.string_val[0].decode().splitlines()
    assert table[0] == "| sentence | answer | guesses |"
    assert all("[MASK]" in line for line in table[2:])
    assert "model.json/text_summary" in tags


def test_the_table_of_runs_has_what_people_vary_and_results_that_are_charts(events: Any) -> None:
    start = HParamsPluginData.FromString(events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content)
    given = {name: value.number_value for name, value in start.session_start_info.hparams.items()}
    assert (given["learning_rate"], given["batch_size"], given["hidden_size"]) == (0.003, 8, 32)
    assert {"decay_rate", "decay_step", "max_steps"} <= given.keys()  # of the schedule LE
    # These have no effect: the loader's old keys, those of other schedules, masking without --dynamic_masking.
    assert not given.keys() & {"num_workers", "async_worker", "decay_power", "decay_proportion", "masking_rate"}
    experiment = HParamsPluginData.FromString(events.SummaryMetadata("_hparams_/experiment").plugin_data.content)
    shown = {metric.name.tag for metric in experiment.experiment.metric_infos}
    assert {f"validation/{name}" for name in ("mlm_loss", "mlm_accuracy", "nsp_accuracy", "perplexity")} <= shown
    assert shown <= set(events.Tags()["scalars"])


def test_histograms_of_all_weights(events: Any) -> None:
    assert "bert/pooler/dense_act/weight" in events.Tags()["histograms"]


def test_without_validation_data_guesses_and_histograms_are_written_with_checkpoints(tmp_path: Path) -> None:
    words = write_project(tmp_path)
    write_vocab(tmp_path)
    content = json.loads((tmp_path / "model.json").read_text())
    del content["validation"]
    (tmp_path / "model.json").write_text(json.dumps({**content, "bert_token_file": "vocab.txt"}))
    run_here([*words, "--max_steps", "4", "--save_every_steps", "3", "--log_histograms"])
    events = read_events(tmp_path)
    assert [event.step for event in events.Tensors("guesses/text_summary")] == [3, 4]
    assert [event.step for event in events.Histograms("bert/pooler/dense_act/weight")] == [3, 4]


def test_killed_before_the_first_checkpoint_no_figure_appears_twice(rank_server: RankServer, tmp_path: Path) -> None:
    csv = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "figures"}}
    words = [*write_project(tmp_path, **csv), "--max_steps", "5", "--save_every_steps", "3", "--log_details"]
    for step in (3, 5):  # right before the first checkpoint, and after it
        killed = rank_server.run(words, 1, tmp_path, faults=[{"kind": "kill", "stage": "before", "step": step}])
        assert killed.codes == [-signal.SIGKILL], killed.text
    assert rank_server.run(words, 1, tmp_path).codes == [0]
    assert [event.step for event in read_events(tmp_path).Scalars("train/loss")] == [1, 2, 3, 4, 5]
    by_samples = EventAccumulator(str(tmp_path / "out" / "runs" / "tiny" / "by_samples")).Reload()
    assert [event.step for event in by_samples.Scalars("train_by_samples/loss")] == [8, 16, 24, 32, 40]
    lines = (tmp_path / "csv" / "figures" / "train_loss.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["step", "1", "2", "3", "4", "5"]


def test_a_line_that_is_only_partly_written_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_whole(path, "first\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match="No space left"):
            append_whole(path, "a line that is too long\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    append_whole(path, "second\n")
    assert path.read_text() == "first\nsecond\n"


def test_the_hook_for_thread_errors_is_replaced_only_by_the_function_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And there it ignores full disks in TensorBoard's thread, and nothing else."""
    shown: list[str] = []

    def before(report: threading.ExceptHookArgs) -> None:
        shown.append(str(report.exc_value))

    monkeypatch.setattr(threading, "excepthook", before)
    Sinks(tmp_path / "runs", True, 0, 0).close()
    assert threading.excepthook is before

    class _AsyncWriterThread(threading.Thread):  # as TensorBoard's is called
        pass

    def fail(error: Exception) -> None:
        raise error

    with without_writer_tracebacks():
        for kind, error in (
            (_AsyncWriterThread, OSError("full")),
            (_AsyncWriterThread, ValueError("a bug")),
            (threading.Thread, OSError("lost")),
        ):
            thread = kind(target=fail, args=(error,))
            thread.start()
            thread.join()
    assert threading.excepthook is before
    assert shown == ["a bug", "lost"]
