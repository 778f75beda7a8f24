"""A run resumes on another number of ranks: same batches, same optimizer state, every ZeRO stage."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_ranks import losses, without_dropout
from tests.rank_server import RankServer
from tests.support import write_project

# fp32 sums in another order: measured differences are below 1e-6. In bf16 the gradients are rounded before the sum.
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-3, "fp16": 2e-3}
MUON_TOLERANCE = 2e-4
ENGINE = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "loss_scale": 128}}}


def train(
    server: RankServer, folder: Path, stage: int, precision: str, parts: list[tuple[int, int]], **engine: Any
) -> list[float]:
    """Losses of a run in parts, each on so many ranks to such a step."""
    zero = {"stage": stage} | ({"reduce_scatter": False} if stage == 3 and engine else {})
    words = write_project(folder, zero_optimization=zero, **ENGINE[precision], **engine)
    without_dropout(folder)
    faults = [{"kind": "no_compiler"}, {"kind": "allow_fp16"}]
    for num_ranks, last_step in parts:
        outcome = server.run([*words, "--max_steps", str(last_step)], num_ranks, folder, faults=faults)
        assert outcome.codes == [0] * num_ranks, outcome.text
    return losses(folder)


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        *((stage, "fp32") for stage in (0, 1, 2, 3)),
        *((stage, "bf16") for stage in (1, 3)),
        (1, "fp16"),
        pytest.param(0, "fp16", marks=pytest.mark.slow),
        pytest.param(3, "fp16", marks=pytest.mark.slow),
    ],
)
def test_one_two_one(stage: int, precision: str, rank_server: RankServer, tmp_path: Path) -> None:
    whole = train(rank_server, tmp_path / "whole", stage, precision, [(1, 9)])
    parts = train(rank_server, tmp_path / "parts", stage, precision, [(1, 3), (2, 6), (1, 9)])
    assert len(whole) == len(parts) == 9
    assert parts == pytest.approx(whole, abs=TOLERANCE[precision])


@pytest.mark.parametrize("stage", [1, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (2, 3))])
def test_muon_keeps_its_momentum(stage: int, rank_server: RankServer, tmp_path: Path) -> None:
    """Which at stages 1 and 2 lies in the files otherwise than the weights do."""
    muon = {"optimizer": {"type": "Muon", "params": {"lr": 0.003}}, "train_batch_size": 6}
    whole = train(rank_server, tmp_path / "whole", stage, "fp32", [(1, 8)], **muon)
    parts = train(rank_server, tmp_path / "parts", stage, "fp32", [(3, 4), (2, 8)], **muon)
    assert parts == pytest.approx(whole, abs=MUON_TOLERANCE)


@pytest.mark.parametrize("stage", [1, 3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 2))])
def test_two_four(stage: int, rank_server: RankServer, tmp_path: Path) -> None:
    whole = train(rank_server, tmp_path / "whole", stage, "fp32", [(1, 6)])
    parts = train(rank_server, tmp_path / "parts", stage, "fp32", [(2, 3), (4, 6)])
    assert parts == pytest.approx(whole, abs=TOLERANCE["fp32"])


def test_the_optimizers_state_matters(rank_server: RankServer, tmp_path: Path) -> None:
    """The comparison above is not blind: with the weights alone carried over, the losses part."""
    whole = train(rank_server, tmp_path / "whole", 1, "fp32", [(1, 9)])
    words = write_project(tmp_path / "parts", zero_optimization={"stage": 1})
    without_dropout(tmp_path / "parts")
    first = rank_server.run([*words, "--max_steps", "3"], 1, tmp_path)
    forget = [{"kind": "forget_optimizer_state"}]
    second = rank_server.run([*words, "--max_steps", "9"], 2, tmp_path, faults=forget)
    assert first.codes == [0]
    assert second.codes == [0, 0], second.text
    assert losses(tmp_path / "parts") != pytest.approx(whole, abs=TOLERANCE["fp32"])
