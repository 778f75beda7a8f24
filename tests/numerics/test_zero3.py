"""ZeRO-3 gathers parameters read outside their module's forward: fused projections, the tied table, recomputation."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest


def test_stage_3_gives_the_losses_of_a_plain_loop() -> None:
    """With dropout, layer drop and every kind of checkpointing; one rank, with partitioned parameters."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    answer = subprocess.run(
        [sys.executable, "-m", "tests.numerics.zero3_run"],
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | world | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    results = json.loads(answer.stdout.strip().splitlines()[-1])
    assert len(results) == 4
    for plain, partitioned in results:
        assert partitioned == pytest.approx(plain, abs=1e-4)
        assert plain == pytest.approx(results[0][0], abs=1e-6)  # for every choice of what is recomputed
        assert len(set(plain)) == 5
