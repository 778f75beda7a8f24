"""--export_dir on two ranks: rank 0 writes the weights of which each has a part."""

from pathlib import Path

import pytest

from tests.rank_server import RankServer
from tests.support import write_project
from tests.unit.training.export.test_final_export import check_export


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_rank_0_exports_for_both(stage: int, rank_server: RankServer, tmp_path: Path) -> None:
    words = [*write_project(tmp_path, zero_optimization={"stage": stage}), "--export_dir", str(tmp_path / "hf")]
    outcome = rank_server.run([*words, "--max_steps", "3"], 2, tmp_path)
    assert outcome.codes == [0, 0], outcome.text
    assert outcome.text.count(f"export: {tmp_path / 'hf'}") == 1
    check_export(tmp_path)
