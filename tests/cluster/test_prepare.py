"""data.prepare --executor dask on two machines: the bytes of one, also if a worker is killed in the middle."""

import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.machines import LAST_RESORT, Machine, started, wait_until
from tests.cluster.runs import printed
from tests.integration.prepare.corpora import digests, write_corpus
from tests.support import PROJECT, run_command

Machines = tuple[Machine, Machine]
OPTIONS = ["--vocab_size", "400", "--max_seq_length", "32", "--dupe_factor", "2", "--shard_rows", "3000"]


def prepare(corpus: Path, output: Path, *options: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "data.prepare",
        "--input",
        str(corpus),
        "--output_dir",
        str(output),
        *OPTIONS,
        *options,
    ]


def test_a_worker_is_killed(machines: Machines, tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(8):
        write_corpus(corpus / f"part_{number}.txt", 1000, seed=number)
    here = run_command(prepare(corpus, tmp_path / "here"))
    assert here.returncode == 0, here.stderr
    log = tmp_path / "dask.txt"
    worker = ["dask", "worker", "tcp://worker-0:8786", "--nthreads", "1", "--no-dashboard", "--nworkers", "2"]
    place = ["--local-directory", str(tmp_path / "spill"), "--death-timeout", str(LAST_RESORT)]
    scheduler = ["dask", "scheduler", "--host", "worker-0", "--no-dashboard"]
    with ExitStack() as stack:
        stack.enter_context(started(machines[0], scheduler, log, PYTHONPATH=str(PROJECT)))
        for machine in machines:
            stack.enter_context(started(machine, [*worker, *place], log, PYTHONPATH=str(PROJECT)))
        wait_until(lambda: log.read_text().count("Registered to:") >= 4, "four workers")
        options = ["--executor", "dask", "--scheduler", "tcp://worker-0:8786", "--work_dir", str(tmp_path / "work")]
        command = prepare(corpus, tmp_path / "there", *options)
        process = stack.enter_context(started(machines[0], command, tmp_path / "output.txt"))
        work = tmp_path / "work"
        wait_until(lambda: any(path.is_file() for path in work.rglob("*")), "the first file of a worker")
        assert process.poll() is None, printed(tmp_path)
        victim = max(machines[1].processes(), key=lambda each: each.cpu_times().user)
        victim.kill()
        assert process.wait(LAST_RESORT) == 0, printed(tmp_path)
    assert digests(tmp_path / "here") == digests(tmp_path / "there")
