"""Runs whose rows get longer: which rows are read when, and that a stopped run resumes with the same losses."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import UserError
from data.shards.dataset import PretrainingDataset, open_dataset
from data.stream.batches import Batch
from data.stream.loader import TrainingStream
from tests.support import LENGTH_SCHEDULE, read_metrics, write_two_lengths
from tests.unit.training.in_process import run_here
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.state import read_state
from training.inputs.datasets import build_stream, mean_tokens
from training.plan.step_plan import Phase, StepPlan, TokenSchedule, plan_steps
from training.runtime.ranks import RankInfo
from training.settings.data_folders import resolve_lengths, schedule_points
from training.settings.flags import read_arguments
from training.settings.model_file import DataSection


def rows_per_step(folder: Path) -> list[int]:
    samples = [row["samples"] for row in read_metrics(folder, "train")]
    return [after - before for before, after in pairwise([0, *samples])]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run_here([*write_two_lengths(folder), "--max_steps", "12", "--validate_every_steps", "6"])
    return folder


def test_tokens_per_step_are_constant_and_validation_is_at_the_longest(whole: Path) -> None:
    rows = rows_per_step(whole)
    switch = rows.index(8)
    assert rows == [16] * switch + [8] * (12 - switch)
    figures = read_metrics(whole, "train")
    assert figures[switch - 2]["tokens"] < 900 <= figures[switch]["tokens"]
    assert all(0 < row["padding_share"] < 0.5 for row in figures)  # of positions of either length
    assert figures[-1]["epoch"] == pytest.approx(switch * 16 / 71 + (12 - switch) * 8 / 64)
    assert [row["step"] for row in read_metrics(whole, "validation")] == [6, 12]
    checkpoints = CheckpointFolder(whole / "out" / "saved_models" / "tiny")
    assert f"step_{switch:08d}" in checkpoints.tags()  # a phase's end is an epoch's


@pytest.mark.parametrize("distance", [-2, 0, 2])
def test_stopped_and_resumed_equals_uninterrupted(distance: int, whole: Path, tmp_path: Path) -> None:
    words = write_two_lengths(tmp_path)
    stop = rows_per_step(whole).index(8) + distance
    run_here([*words, "--max_steps", str(stop)])
    run_here([*words, "--max_steps", "12"])
    for key in ("loss", "samples", "tokens", "grad_norm"):
        figures = [[row[key] for row in read_metrics(folder, "train")] for folder in (whole, tmp_path)]
        assert figures[0] == figures[1], key


def test_three_schedules_in_one_run(tmp_path: Path) -> None:
    words = write_two_lengths(tmp_path, train_batch_size=4, train_micro_batch_size_per_gpu=4)
    masking = ["--dynamic_masking", "--masking_rate", "0:0.4,1800:0.1", "--max_predictions_per_seq", "12"]
    flags = [*words, *masking, "--batch_schedule", "0:4,500:12", "--save_every_steps", "3"]
    run_here([*flags, "--max_steps", "14"])
    assert sorted(set(rows_per_step(tmp_path))) == [8, 12, 24]  # 8 of 12, 24 of 12, 12 of 24
    rows = read_metrics(tmp_path, "train")
    rates, tokens = [row["masking_rate"] for row in rows], [row["tokens"] for row in rows]
    for rate, before, after in zip(rates, [0, *tokens[:-1]], tokens, strict=True):
        middle = (before + min(after, 1800)) / 2
        assert rate == pytest.approx(max(0.1, 0.4 - 0.3 * middle / 1800), abs=0.08)

    again = tmp_path / "again"
    words = write_two_lengths(again, train_batch_size=4, train_micro_batch_size_per_gpu=4)
    flags = [*words, *masking, "--batch_schedule", "0:4,500:12", "--save_every_steps", "3"]
    for stop in ("5", "11", "14"):
        run_here([*flags, "--max_steps", stop])
    assert [row["loss"] for row in read_metrics(again, "train")] == [row["loss"] for row in rows]


def read_global_batches(data: tuple[PretrainingDataset, ...], world_size: int, num_steps: int) -> list[Batch]:
    """The rows of each step from all ranks."""
    phases = [
        (tokens, Phase(index, length, 8 * 24 // length // world_size, data[index].num_rows, mean_tokens(data[index])))
        for index, (tokens, length) in enumerate(schedule_points(TokenSchedule.parse(LENGTH_SCHEDULE), 24))
    ]
    plan = plan_steps(phases, None, accumulation=1, world_size=world_size)
    places = [RankInfo(rank, rank, world_size, world_size) for rank in range(world_size)]
    ranks = [walk(plan, place, data, num_steps) for place in places]
    return [join(batches) for batches in zip(*ranks, strict=True)]


def sorted_rows(batch: Batch) -> list[list[int]]:
    """Tokens and labels of each row: ranks share the rows of a step in an order of their own."""
    return sorted(torch.cat([batch.input_ids, batch.masked_lm_labels], dim=1).tolist())


def join(batches: Sequence[Batch]) -> Batch:
    kind, *fields = zip(*batches, strict=True)
    return Batch(kind[0], *(torch.cat(parts) for parts in fields))


def walk(plan: StepPlan, rank_info: RankInfo, data: tuple[PretrainingDataset, ...], num_steps: int) -> list[Batch]:
    """One rank's steps, each from a new stream: only the cursor is passed on."""
    cursor, found = 0, []
    for _ in range(num_steps):
        steps: Any = build_stream(data, rank_info, 42, None, plan.at(cursor)).steps(cursor)
        step = next(steps)
        steps.close()
        found.append(step.micro_batches[0])
        cursor = step.next_sample
    return found


def test_one_and_two_ranks_read_the_same_batches(tmp_path: Path) -> None:
    write_two_lengths(tmp_path)
    data = tuple(
        open_dataset([tmp_path / folder], split="training", max_seq_length=length, max_predictions_per_seq=4)
        for folder, length in (("short", 12), ("data", 24))
    )
    one, two = (read_global_batches(data, ranks, num_steps=11) for ranks in (1, 2))
    widths = [step.input_ids.shape[1] for step in one]
    assert widths == sorted(widths)
    assert set(widths) == {12, 24}
    for mine, theirs in zip(one, two, strict=True):
        assert sorted_rows(mine) == sorted_rows(theirs)
    alone: Any = TrainingStream(
        data[1], seed=42, rank=0, world_size=1, micro_batch_size=8, gradient_accumulation_steps=1
    )
    steps = alone.steps(0)
    for mine in one[widths.index(24) :]:  # the longer data from its first row on, none left out
        assert torch.equal(mine.input_ids, next(steps).micro_batches[0].input_ids)
    steps.close()


def test_the_digest_covers_the_data_of_all_lengths(whole: Path) -> None:
    checkpoints = CheckpointFolder(whole / "out" / "saved_models" / "tiny")
    digest = read_state(checkpoints.folder / checkpoints.choose(None)).data_digest
    data = open_dataset([whole / "data"], split="training", max_seq_length=24, max_predictions_per_seq=4)
    assert digest != data.digest  # it stands for both lengths


def lengths(points: tuple[tuple[int, int], ...], micro: int = 4) -> list[tuple[int, int, int]]:
    data = DataSection(
        mixed_seq_datasets={"128": {"wiki": "short"}, "384": {"wiki": "middle"}, "512": {"wiki": "long"}}
    )
    flags, _ = read_arguments(["--max_predictions_per_seq", "80"])
    found = resolve_lengths(points, micro, data, flags.data, Path("model.json"))
    return [(each.length, each.micro, each.max_predictions) for each in found]


def test_micro_batches_and_predictions_follow_the_length() -> None:
    assert lengths(((0, 512),)) == [(512, 4, 80)]
    assert lengths(((0, 128), (10, 512))) == [(128, 16, 20), (512, 4, 80)]
    assert lengths(((0, 128), (5, 384), (10, 512)), micro=3) == [(128, 12, 20), (384, 4, 60), (512, 3, 80)]
    with pytest.raises(UserError, match=r"4 rows of 512 tokens has 2048 tokens, not a multiple of 384"):
        lengths(((0, 384), (10, 512)))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--length_schedule", "0:24,1k:12"], "lengths that are whole numbers and rise"),
        (["--length_schedule", "0:12,1k:32"], "pass --max_seq_length 32"),
        (["--length_schedule", "0:8,1k:24"], r"no entry for rows of 8 tokens .* or --length_schedule\)"),
        (["--max_steps_per_epoch", "3"], "--length_schedule and --max_steps_per_epoch cannot be combined"),
    ],
)
def test_mistakes_are_reported(flags: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        run_here([*write_two_lengths(tmp_path), *flags])
