"""Two real gloo ranks give the losses that one rank gives, at every ZeRO stage and under the real launcher."""

import json
from pathlib import Path

import h5py
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from data.shards.schema import ATTRIBUTE, FORMAT_VERSION
from tests.rank_server import RankServer
from tests.support import VOCAB, add_probes, read_metrics, run_deepspeed, write_project

NUM_STEPS = 6
PROBE_ALL = ["--probe_every_steps", "3", "--probe_seconds", "600"]  # enough for all rows, in several batches
# fp32 sums in another order: measured differences are below 2e-6 over these steps.
TOLERANCE = 2e-5


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder, "train")]


def without_dropout(folder: Path, other_keys: str = "") -> None:
    """Dropout differs from rank to rank by design, so the comparison goes without."""
    path = folder / "model.json"
    keys = f'"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, {other_keys}"hidden_size"'
    path.write_text(path.read_text().replace('"hidden_size"', keys))


@pytest.fixture(scope="module")
def one_rank(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    words = write_project(folder)
    without_dropout(folder)
    outcome = rank_server.run([*words, *add_probes(folder), *PROBE_ALL, "--max_steps", str(NUM_STEPS)], 1, folder)
    assert outcome.codes == [0], outcome.text
    return folder


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_train_as_one_does(stage: int, one_rank: Path, rank_server: RankServer, tmp_path: Path) -> None:
    words = write_project(tmp_path, zero_optimization={"stage": stage})
    without_dropout(tmp_path)
    outcome = rank_server.run([*words, *add_probes(tmp_path), *PROBE_ALL, "--max_steps", str(NUM_STEPS)], 2, tmp_path)
    assert outcome.codes == [0, 0], outcome.text
    assert_trained_alike(tmp_path, one_rank)
    assert_only_the_first_rank_speaks(tmp_path)
    ours, theirs = (
        [(row["step"], row["order"], row["rows"]) for row in read_metrics(folder, "probe")]
        for folder in (tmp_path, one_rank)
    )
    assert [step for step, *_ in ours] == [0, 3, 6]
    assert ours == theirs


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_with_short_and_with_long_sequences(
    stage: int, one_rank: Path, rank_server: RankServer, tmp_path: Path
) -> None:
    """They leave out different work, and must hand over their gradients in the same order all the same."""
    words = write_project(tmp_path, zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0})
    without_dropout(tmp_path, '"attention_backend": "grouped", ')
    words += ["--max_steps", str(NUM_STEPS)]
    outcome = rank_server.run(words, 2, tmp_path, faults=[{"kind": "long_sequences", "rank": 1}])
    assert outcome.codes == [0, 0], outcome.text
    assert_trained_alike(tmp_path, one_rank)


def assert_only_the_first_rank_speaks(folder: Path) -> None:
    """Plain lines, because there is no terminal; library logs are in one file per rank."""
    first, second = ((folder / "rank_output" / f"{rank}.txt").read_text() for rank in (0, 1))
    steps = [line.split()[1] for line in first.splitlines() if line.startswith("step ")]
    assert steps == [f"{step}/{NUM_STEPS}" for step in range(1, NUM_STEPS + 1)]
    assert not {"\r", "\x1b"} & set(first)
    assert second == ""
    for rank in (0, 1):
        log = (folder / "out" / "runs" / "tiny" / "logs" / f"rank_{rank}.log").read_text()
        assert "DeepSpeed" in log
        assert "DeepSpeed info" not in first


def test_two_ranks_under_the_real_launcher(one_rank: Path, tmp_path: Path) -> None:
    words = write_project(tmp_path, zero_optimization={"stage": 1})
    without_dropout(tmp_path)
    outcome = run_deepspeed([*words, "--max_steps", str(NUM_STEPS)], num_ranks=2)
    assert outcome.returncode == 0, outcome.stderr
    assert_trained_alike(tmp_path, one_rank)


def assert_trained_alike(tmp_path: Path, one_rank: Path) -> None:
    assert losses(tmp_path) == pytest.approx(losses(one_rank), abs=TOLERANCE)
    assert len(losses(tmp_path)) == NUM_STEPS
    ours, theirs = (read_metrics(folder, "validation")[-1] for folder in (tmp_path, one_rank))
    assert ours["mlm_loss"] == pytest.approx(theirs["mlm_loss"], abs=TOLERANCE)
    assert ours["nsp_accuracy"] == theirs["nsp_accuracy"]


def test_accumulation_gives_the_same_losses(one_rank: Path, rank_server: RankServer, tmp_path: Path) -> None:
    words = write_project(tmp_path, train_micro_batch_size_per_gpu=2)
    without_dropout(tmp_path)
    outcome = rank_server.run([*words, "--max_steps", str(NUM_STEPS)], 1, tmp_path)
    assert outcome.codes == [0], outcome.text
    assert losses(tmp_path) == pytest.approx(losses(one_rank), abs=TOLERANCE)


def test_mixed_sentence_labels_give_the_same_losses_for_any_split(rank_server: RankServer, tmp_path: Path) -> None:
    """Rows of one shard have no sentence labels, so micro-batches differ in the number of labelled pairs."""
    found = []
    for ranks, micro_batch in ((1, 8), (1, 2), (2, 1)):
        folder = tmp_path / f"{ranks}_{micro_batch}"
        words = write_project(folder, train_micro_batch_size_per_gpu=micro_batch)
        without_dropout(folder)
        with h5py.File(folder / "data" / "wiki_training_0.hdf5", "r+") as shard:
            shard.attrs[ATTRIBUTE] = json.dumps({"format_version": FORMAT_VERSION, "objective": "mlm"})
        outcome = rank_server.run([*words, "--max_steps", str(NUM_STEPS)], ranks, folder)
        assert outcome.codes == [0] * ranks, outcome.text
        found.append(losses(folder))
        assert len(found[-1]) == NUM_STEPS
    assert found[1] == pytest.approx(found[0], abs=TOLERANCE)
    assert found[2] == pytest.approx(found[0], abs=TOLERANCE)


def test_layer_drop_decides_alike_on_all_ranks_and_after_a_resume(rank_server: RankServer, tmp_path: Path) -> None:
    """Ranks that left out other blocks, or a resumed run that did, would come to other losses."""
    block = {"enabled": True, "theta": 0.3, "gamma": 5.0}
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        words = write_project(folder, progressive_layer_drop=block, zero_optimization={"stage": ranks - 1})
        without_dropout(folder)
        path = folder / "model.json"  # weights so large that a block left out shows in the loss at once
        path.write_text(path.read_text().replace('"hidden_size"', '"initializer_range": 0.2, "hidden_size"'))
        for steps in (NUM_STEPS,) if ranks == 1 else (3, NUM_STEPS):
            flags = ["--max_steps", str(steps), "--progressive_layer_drop"]
            outcome = rank_server.run([*words, *flags], ranks, folder)
            assert outcome.codes == [0] * ranks, outcome.text
    alone, together = losses(tmp_path / "1"), losses(tmp_path / "2")
    assert len(alone) == NUM_STEPS
    assert together == pytest.approx(alone, abs=TOLERANCE)


def test_guesses_are_shown_where_no_rank_has_the_whole_model(rank_server: RankServer, tmp_path: Path) -> None:
    tables = []
    for stage, ranks in ((0, 1), (3, 2)):
        folder = tmp_path / str(stage)
        zero = {"stage": stage} | ({"stage3_param_persistence_threshold": 0} if stage == 3 else {})
        words = write_project(folder, zero_optimization=zero)
        without_dropout(folder)
        name_vocabulary(folder)
        flags = ["--max_steps", "3", "--validate_every_steps", "1"]
        outcome = rank_server.run([*words, *flags], ranks, folder)
        assert outcome.codes == [0] * ranks, outcome.text
        events = EventAccumulator(str(folder / "out" / "runs" / "tiny"), size_guidance={"tensors": 0}).Reload()
        tables.append([event.tensor_proto.string_val[0] for event in events.Tensors("guesses/text_summary")])
        assert len(losses(folder)) == 3
    assert len(tables[0]) == 3
    assert tables[1] == tables[0]


def name_vocabulary(folder: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{index}" for index in range(VOCAB - 5))]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    path = folder / "model.json"
    path.write_text(path.read_text().replace('"name": "tiny"', '"name": "tiny", "bert_token_file": "vocab.txt"'))
