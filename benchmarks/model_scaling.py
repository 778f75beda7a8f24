"""How cost grows: time and memory of a forward and backward pass against sequence length, batch, depth and width.

Rows are full. Three kinds of models: "classic" BERT with dropout, "modern" with rotary positions and a window of 128 in
two of three layers, and "window" with the window in every layer. Each point is measured in a process of its own; memory
is its peak above what it held before the pass. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.batches import make_batch
from benchmarks.timing import clock
from common.console import console
from common.errors import run_command
from common.memory import keep_freed_memory, peak_resident_mib
from nvidia.config import BertConfig
from nvidia.cpu.startup import configure_onednn
from nvidia.modelingpreln import BertForPreTrainingPreLN

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
MODERN_LENGTHS = (512, 1024, 2048, 4096, 8192)
BATCHES = (1, 2, 4, 8, 16)
DEPTHS = (2, 4, 8, 16)
WIDTHS = (64, 128, 256, 512, 768)
TOKENS = 8192  # of every point along the length: fewer rows as they grow longer
VOCAB_SIZE = 8192
WINDOW = 128
MODERN = {
    "hidden_act": "geglu",
    "position_embedding_type": "rotary",
    "attention_window": WINDOW,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
KINDS: dict[str, dict[str, Any]] = {
    "classic": {},
    "modern": MODERN | {"global_attention_every": 3},
    "window": MODERN | {"global_attention_every": 0},
}


AXES: dict[str, list[tuple[str, int, int, int]]] = {  # (kind, rows, length, depth)
    "length": [("classic", TOKENS // length, length, 4) for length in LENGTHS],
    "window": [(kind, TOKENS // length, length, 4) for kind in ("modern", "window") for length in MODERN_LENGTHS],
    "batch": [("classic", rows, 128, 4) for rows in BATCHES],
    "depth": [("classic", 16, 128, depth) for depth in DEPTHS],
    "width": [("classic", 16, 128, 4)] * len(WIDTHS),
}


def measure_here(kind: str, rows: int, length: int, depth: int, hidden: int, repeats: int) -> dict[str, float]:
    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        num_hidden_layers=depth,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
        max_position_embeddings=max(length, WINDOW),
        **KINDS[kind],
    )
    model = BertForPreTrainingPreLN(config)
    model(make_batch(1, 16, 1.0, VOCAB_SIZE, 2, seed=0)).backward()  # gradients and first-call costs are there
    batch = make_batch(rows, length, 1.0, VOCAB_SIZE, length, seed=0)
    before, best = peak_resident_mib(), float("inf")
    for _ in range(repeats):
        start = clock()
        model(batch).backward()
        best = min(best, clock() - start)
    return {"seconds": round(best, 3), "mb": round(peak_resident_mib() - before, 1)}


def measure(kind: str, rows: int, length: int, depth: int, hidden: int, repeats: int) -> dict[str, Any]:
    point = [kind, *[str(value) for value in (rows, length, depth)]]
    sizes = ["--hidden", str(hidden), "--repeats", str(repeats)]
    command = [sys.executable, __file__, *sizes, "--point", *point]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1800)
    result: dict[str, float] = json.loads(answer.stdout.strip().splitlines()[-1])
    tokens = rows * length
    each_time, each_memory = 1e6 * result["seconds"] / tokens, 1024 * result["mb"] / tokens
    console.say(
        f"  {kind:7s} {rows:4d} rows x {length:5d} tokens x {depth:3d} layers of {hidden:3d} "
        f"{result['seconds']:9.3f} s  "
        f"{each_time:8.1f} us/token {result['mb']:8.1f} MB {each_memory:7.1f} KB/token"
    )
    return {"kind": kind, "rows": rows, "length": length, "depth": depth, "hidden": hidden, **result}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256, help="hidden size, a multiple of 64; axis width has its own")
    parser.add_argument("--repeats", type=int, default=3, help="passes of a point; the fastest counts")
    parser.add_argument("--axis", choices=AXES, nargs="+", default=list(AXES), help="what to measure; all by default")
    parser.add_argument("--point", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    configure_onednn()
    keep_freed_memory()
    torch.manual_seed(0)
    if arguments.point:
        kind, *sizes = arguments.point
        console.say(json.dumps(measure_here(kind, *map(int, sizes), arguments.hidden, arguments.repeats)))
        return 0
    result = {}
    for axis in arguments.axis:
        console.say(f"against {axis}")
        widths = WIDTHS if axis == "width" else [arguments.hidden] * len(AXES[axis])
        result[axis] = [
            measure(*point, width, arguments.repeats) for point, width in zip(AXES[axis], widths, strict=True)
        ]
    console.say(json.dumps(result))
    return 0


if __name__ == "__main__":
    run_command(main)
