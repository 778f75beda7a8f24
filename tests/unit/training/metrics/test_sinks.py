"""Figures in TensorBoard and in the CSV monitor, read back."""

import json
import resource
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from common.files import append_whole
from data.tokenizer import load_tokenizer
from tests.rank_server import RankServer
from tests.support import VOCAB, read_metrics, write_project
from tests.unit.training.in_process import run_here
from training.guesses import SENTENCES, encode
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


def test_scalars_on_steps_and_on_samples(events: Any) -> None:
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]
    by_samples = EventAccumulator(f"{events.path}/by_samples").Reload()
    assert [event.step for event in by_samples.Scalars("train_by_samples/loss")] == [8, 16, 24, 32]
    on_steps = {tag for tag in events.Tags()["scalars"] if tag.startswith(("train/", "validation/"))}
    assert {tag.replace("_by_samples/", "/") for tag in by_samples.Tags()["scalars"]} == on_steps
    assert [event.step for event in events.Scalars("validation/perplexity")] == [2, 4]


def test_guesses_configs_and_final_figures(events: Any) -> None:
    tags = events.Tags()["tensors"]
    guesses = events.Tensors("guesses/text_summary")
    assert [event.step for event in guesses] == [2, 4]
    assert "capital of" in guesses[0].tensor_proto.string_val[0].decode()
    assert "model.json/text_summary" in tags
    assert "final/validation/mlm_loss" in events.Tags()["scalars"]


def test_the_table_of_runs_has_the_settings_and_the_last_figures(events: Any, finished: Path) -> None:
    start = HParamsPluginData.FromString(events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content)
    given = {name: value.number_value for name, value in start.session_start_info.hparams.items()}
    assert (given["learning_rate"], given["batch_size"], given["hidden_size"]) == (0.003, 8, 32)
    experiment = HParamsPluginData.FromString(events.SummaryMetadata("_hparams_/experiment").plugin_data.content)
    shown = {metric.name.tag for metric in experiment.experiment.metric_infos}
    last = read_metrics(finished, "validation")[-1]
    for name in ("mlm_loss", "mlm_accuracy", "nsp_accuracy", "perplexity"):
        assert f"final/validation/{name}" in shown
        (event,) = events.Scalars(f"final/validation/{name}")
        assert event.value == pytest.approx(last[name], rel=1e-6)


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
    words = [*write_project(tmp_path, **csv), "--max_steps", "5", "--save_every_steps", "3"]
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


def test_sentences_have_one_mask_between_the_specials(tmp_path: Path) -> None:
    write_vocab(tmp_path)
    tokenizer = load_tokenizer(tmp_path / "vocab.txt")
    for sentence in SENTENCES:
        row = encode(tokenizer, sentence)
        assert (row[0], row[-1]) == (tokenizer.cls_id, tokenizer.sep_id)
        assert row.count(tokenizer.mask_id) == 1


def test_the_hook_for_thread_errors_is_replaced_only_by_the_function_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And there it ignores full disks in TensorBoard's thread, and nothing else."""
    shown: list[str] = []

    def before(report: threading.ExceptHookArgs) -> None:
        shown.append(str(report.exc_value))

    monkeypatch.setattr(threading, "excepthook", before)
    Sinks(tmp_path / "runs", True, SimpleNamespace(step=0, samples=0)).close()
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
