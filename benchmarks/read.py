"""Measure the speed of the training stream and the memory of a rank: `python benchmarks/read.py`.

Measures the whole stream as a rank uses it: read, check, shuffle, mask, convert to int64 tensors, micro-batches of 64
rows of 128 tokens. The main rate is rows per second of CPU time of all threads, that is, per core. A second table has
the time to the first batch of a run that resumes at a late step. A third one simulates jobs of several ranks: the rows
that they decode together over the rows that they deliver, and the rate of the whole job if each rank has one core for
its data.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.memory import peak_resident_mib

ROOT = Path(__file__).resolve().parents[1]
MAX_SEQ_LENGTH, MAX_PREDICTIONS, VOCAB_SIZE = 128, 20, 30522
MICRO_BATCH = 64
RANKS, GLOBAL_BATCHES = (1, 8, 64, 512), (256, 512, 1024, 4096, 16_384, 65_536)
RESUMED_STEPS = (0, 1_000, 100_000, 10_000_000)
SIMULATED_RANKS = 16  # of a larger job, evenly spaced


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000, help="rows to read from each kind of shard")
    parser.add_argument("--file_rows", type=int, default=50_000, help="rows per shard; there are four shards")
    parser.add_argument("--child", nargs=2, metavar=("DIR", "MASKING"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        folder, masking = Path(arguments.child[0]), arguments.child[1]
        others = {"jobs": _simulate_jobs, "resumed": _resume}
        found = others[masking](folder) if masking in others else _stream(folder, masking, arguments.rows)
        print(json.dumps(found))
        return 0
    with tempfile.TemporaryDirectory(prefix="read-") as name:
        folder = Path(name)
        _write(folder, 4, arguments.file_rows)
        print(f"{'shards':<16} {'masking':<8} {'rows/s/core':>15} {'rows/s':>9} {'first batch s':>14} {'peak MB':>8}")
        results = {}
        for kind in ("ours", "uncompressed", "nvidia"):
            for masking in ("static", "token", "word") if kind == "ours" else ("token",):
                results[kind, masking] = _run(folder / kind, masking, arguments.rows)
                found = results[kind, masking]
                print(
                    f"{kind:<16} {masking:<8} {found['rows_per_cpu_s']:>15,.0f} {found['rows_per_s']:>9,.0f} "
                    f"{found['first_s']:>14.2f} {found['rss_mb']:>8.0f}"
                )
        resumed = _run(folder / "ours", "resumed", arguments.rows)
        jobs = _run(folder / "ours", "jobs", arguments.rows)
    print("peak MB of the whole process; torch and h5py alone take about", round(results["ours", "static"]["base_mb"]))
    print(f"\n{'resumed at step':>16} {'first batch, CPU s':>20}")
    for step, seconds in resumed.items():
        print(f"{int(step):>16,} {seconds:>20.2f}")
    _print_jobs(jobs)
    print(
        json.dumps(
            {
                "rows_per_s": round(results["ours", "token"]["rows_per_cpu_s"]),
                "rows_per_s_nvidia": round(results["nvidia", "token"]["rows_per_cpu_s"]),
                "rss_mb": round(max(result["rss_mb"] for result in results.values())),
                "rows_per_s_word": round(results["ours", "word"]["rows_per_cpu_s"]),
                "rows_per_s_uncompressed": round(results["uncompressed", "token"]["rows_per_cpu_s"]),
                "first_batch_s_by_step": resumed,
                "max_decoded_per_row": max(job["decoded"] for job in jobs if job["batch"] >= job["units"]),
                "rows_per_s_of_512_ranks": round(max(job["rows_per_s"] for job in jobs if job["ranks"] == 512)),
            }
        )
    )
    return 0


def _write(folder: Path, num_files: int, rows_per_file: int) -> None:
    """Write the same rows as our shards, compressed and uncompressed, and as NVIDIA's tool writes them."""
    import h5py

    from data.shards.schema import DATASETS
    from data.shards.writer import shard_bytes

    for number in range(num_files):
        rows = _rows(rows_per_file, number)
        name = f"training_{number}.hdf5"
        for kind in ("ours", "uncompressed", "nvidia"):
            (folder / kind).mkdir(parents=True, exist_ok=True)
        (folder / "ours" / name).write_bytes(shard_bytes(rows, {"masked": True}))
        (folder / "uncompressed" / name).write_bytes(shard_bytes(rows, {"masked": True}, compression=None))
        with h5py.File(folder / "nvidia" / name, "w") as file:
            for field, (_, kind) in DATASETS.items():
                file.create_dataset(field, data=getattr(rows, field), dtype=kind, compression="gzip")


def _rows(count: int, seed: int):
    from data.masking import mask_rows
    from data.shards.schema import Rows

    rng = np.random.default_rng(seed)
    ranks = np.exp(rng.random((count, MAX_SEQ_LENGTH)) * np.log(VOCAB_SIZE - 1000)).astype(np.int32)  # log-uniform
    lengths = np.where(rng.random(count) < 0.9, MAX_SEQ_LENGTH, rng.integers(20, MAX_SEQ_LENGTH, count))
    column = np.arange(MAX_SEQ_LENGTH)
    input_mask = (column < lengths[:, None]).astype(np.int8)
    ids = np.where(input_mask == 1, 999 + ranks, 0).astype(np.int32)
    ids[:, 0] = 101
    ids[np.arange(count), lengths - 1] = 102
    segments = ((column > lengths[:, None] // 2) & (input_mask == 1)).astype(np.int8)
    empty = np.zeros((count, MAX_PREDICTIONS), dtype=np.int32)
    starts = np.packbits(rng.random((count, MAX_SEQ_LENGTH)) < 0.8, axis=1)
    rows = Rows(ids, input_mask, segments, empty, empty, rng.integers(0, 2, count).astype(np.int8), starts)
    return mask_rows(rows, _policy("token"), seed=1, epoch=0, row_numbers=np.arange(count))


def _policy(unit: str):
    from data.masking import MaskingPolicy

    return MaskingPolicy(
        mask_id=103, special_ids=(0, 100, 101, 102, 103), vocab_size=VOCAB_SIZE,
        max_predictions_per_seq=MAX_PREDICTIONS, unit=unit,  # type: ignore[arg-type]
    )  # fmt: skip


def _run(folder: Path, masking: str, rows: int) -> Any:
    """Run in a subprocess, to measure its memory; torch gets one thread."""
    command = [sys.executable, "-m", "benchmarks.read", "--child", str(folder), masking, "--rows", str(rows)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return json.loads(subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True).stdout)


def _print_jobs(jobs: list[dict[str, float]]) -> None:
    print(
        f"\n{'ranks':>6} {'global batch':>13} {'rows per rank':>14} {'decoded/delivered':>18} {'rows/s of the job':>18}"
    )
    for job in jobs:
        print(
            f"{job['ranks']:>6} {job['batch']:>13,} {job['batch'] // job['ranks']:>14,} {job['decoded']:>18.2f} "
            f"{job['rows_per_s']:>18,.0f}"
        )
    print(f"a shuffle window has {jobs[0]['units']} units\n")


def _simulate_jobs(folder: Path) -> list[dict[str, float]]:
    """Read one epoch as each rank of a job would, token masking; of many ranks only some."""
    from data.stream.batches import batch_from_rows
    from data.stream.order import INTERLEAVED_WINDOW_ROWS
    from data.stream.row_source import RowSource

    dataset, jobs = _open(folder), []
    units = min(INTERLEAVED_WINDOW_ROWS, dataset.num_rows) // dataset.shards[0].layout.unit_rows
    for ranks in RANKS:
        for batch in (batch for batch in GLOBAL_BATCHES if ranks <= batch <= dataset.num_rows):
            decoded, delivered, seconds = 0, 0, 0.0
            simulated = range(0, ranks, max(1, ranks // SIMULATED_RANKS))
            for rank in simulated:
                source = RowSource(dataset, 1, _policy("token"), rank=rank, world_size=ranks)
                began = time.process_time()
                for start in range(0, dataset.num_rows - batch + 1, batch):
                    rows, _ = source.read(start, start + batch)
                    delivered += len(batch_from_rows(rows).input_ids)
                seconds += time.process_time() - began
                decoded += source.decoded_rows
                source.close()
            rate = delivered / seconds * ranks
            jobs.append(
                {"ranks": ranks, "batch": batch, "units": units, "decoded": decoded / delivered, "rows_per_s": rate}
            )
    return jobs


def _open(folder: Path):
    from data.shards.dataset import open_dataset

    return open_dataset(
        [folder],
        split="training",
        max_seq_length=MAX_SEQ_LENGTH,
        max_predictions_per_seq=MAX_PREDICTIONS,
        vocab_size=VOCAB_SIZE,
    )


def _open_stream(folder: Path, masking: str):
    from data.stream.loader import TrainingStream

    return TrainingStream(
        _open(folder),
        seed=1,
        rank=0,
        world_size=1,
        micro_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=1,
        masking=None if masking == "static" else _policy(masking),
    )


def _resume(folder: Path) -> dict[int, float]:
    """The CPU time from opening the shards to the first batch of a run that resumes at each step."""
    found = {}
    for step in (0, *RESUMED_STEPS):  # the first one includes imports, and is measured again
        began = time.process_time()
        stream = _open_stream(folder, "token")
        steps = stream.steps(step * stream.rows_per_step)
        next(steps)
        found[step] = time.process_time() - began
        steps.close()  # type: ignore[attr-defined]
    return found


def _stream(folder: Path, masking: str, rows: int) -> dict[str, float]:
    import data.stream.loader  # noqa: F401

    base = peak_resident_mib()
    stream = _open_stream(folder, masking)
    wall, processor = time.perf_counter(), time.process_time()
    steps = stream.steps(0)
    next(steps)
    first = time.perf_counter() - wall
    count = rows // MICRO_BATCH
    for _ in islice(steps, count - 1):
        pass
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    steps.close()  # type: ignore[attr-defined]
    return {
        "rows_per_cpu_s": count * MICRO_BATCH / processor,
        "rows_per_s": count * MICRO_BATCH / wall,
        "first_s": first,
        "base_mb": base,
        "rss_mb": peak_resident_mib(),
    }


if __name__ == "__main__":
    sys.exit(main())
