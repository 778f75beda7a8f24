"""One training step of BERT-base: ours, ours in the DeepSpeed engine, stock transformers, and a plain reference.

Further contenders by name: transformers compiled by torch.compile, and ModernBERT by ours and by stock transformers.
Every contender takes the same batches, whose rows have the lengths of real shards: forward and backward over a few
micro-batches, clipping, AdamW. They take turns in one process, so that other work on the machine affects all; the best
round counts. Peak memory is measured in a separate process. The last line is JSON.
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

from benchmarks.batches import Batch, make_batch, num_tokens
from benchmarks.contenders import BUILDERS, Step
from benchmarks.matmul_limit import seconds, step_products
from benchmarks.timing import clock
from common.console import console
from common.errors import run_command
from common.memory import peak_resident_mib
from nvidia.config import BertConfig
from nvidia.cpu.libraries import use
from nvidia.cpu.startup import configure_onednn, keep_freed_memory
from nvidia.fastest import measure_libraries

CONTENDERS = tuple(BUILDERS)
DEFAULT = ("ours", "engine", "transformers", "reference")
# length → rows of a micro-batch, predictions per row
WORKLOADS = {128: (16, 20), 512: (8, 80)}
# By torch's matmul; and by that of nvidia/cpu/linear.py, which may be faster on this processor (the
# model does not take it for all gradients of weights).
LIMITS = ("limit", "linear_limit")


def workload(length: int, accumulation: int, config: BertConfig) -> list[Batch]:
    rows, predictions = WORKLOADS[length]
    return [make_batch(rows, length, None, config.num_tokens, predictions, seed) for seed in range(accumulation)]


def measure(config: BertConfig, length: int, names: Sequence[str], rounds: int, accumulation: int) -> dict[str, float]:
    """Real tokens per second of each contender and the matmul limit, from each one's best round."""
    batches = workload(length, accumulation, config)
    use_fastest(config, WORKLOADS[length][0], length)
    steps = {name: BUILDERS[name](config, accumulation) for name in names}
    best = dict.fromkeys((*names, *LIMITS), float("inf"))
    for round_number in range(rounds):
        for name in rotated(names, round_number):
            step = steps[name]
            if round_number == 0:
                warm_up(step, name, batches)
            start = clock()
            step(batches)
            best[name] = min(best[name], clock() - start)
            console.say(
                f"  {length} round {round_number + 1} {name:<13} {num_tokens(batches) / best[name]:7.1f} tokens/s"
            )
        scale = num_tokens(batches) / num_tokens(batches[:1])
        for name in LIMITS:
            limit = scale * seconds(step_products(config, batches[0]).items(), as_linear=name == "linear_limit")
            best[name] = min(best[name], limit)
    return {name: num_tokens(batches) / spent for name, spent in best.items()}


def use_fastest(config: BertConfig, rows: int, length: int) -> None:
    """Choose the libraries of matrix products as a run does when it starts."""
    measured = measure_libraries(config, rows, length)
    use(measured.libraries)
    console.say(f"products: {measured.describe() or 'torch'}")


def rotated(names: Sequence[str], by: int) -> list[str]:
    """Rotate the order each round, so that no contender always follows the same other."""
    start = by % len(names)
    return [*names[start:], *names[:start]]


def warm_up(step: Step, name: str, batches: list[Batch]) -> None:
    """Warm up: the engine needs a whole accumulation window, the others one micro-batch."""
    step(batches if name == "engine" else batches[:1])


def peak_megabytes(name: str, arguments: argparse.Namespace, length: int) -> float:
    """Peak memory of a process that runs only one step of this contender."""
    options = {"--only_memory": name, "--lengths": length, "--accumulation": 2}
    options |= {f"--{key}": getattr(arguments, key) for key in ("layers", "hidden", "vocab_size")}
    command = [sys.executable, __file__, *(str(word) for option in options.items() for word in option)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1800)
    return float(answer.stdout.strip().splitlines()[-1])


def report_memory(name: str, config: BertConfig, length: int, accumulation: int) -> None:
    BUILDERS[name](config, accumulation)(workload(length, accumulation, config))
    console.say(f"{peak_resident_mib():.0f}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--contenders", nargs="+", default=list(DEFAULT), choices=CONTENDERS)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender; the best counts")
    parser.add_argument("--accumulation", type=int, default=4, help="micro-batches of a step")
    parser.add_argument("--layers", type=int, default=12, help="12 is BERT-base; fewer make a quick look")
    parser.add_argument("--hidden", type=int, default=768, help="hidden size, a multiple of 64")
    parser.add_argument("--vocab_size", type=int, default=30522)
    parser.add_argument("--no_memory", action="store_true", help="leave out the peak memory")
    parser.add_argument("--only_memory", choices=CONTENDERS, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    config = BertConfig(
        vocab_size=arguments.vocab_size,
        hidden_size=arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        intermediate_size=4 * arguments.hidden,
    ).with_padded_vocab()
    configure_onednn()
    keep_freed_memory()
    torch.manual_seed(0)
    if arguments.only_memory:
        report_memory(arguments.only_memory, config, arguments.lengths[0], arguments.accumulation)
        return 0
    result: dict[str, Any] = {}
    for length in arguments.lengths:
        speeds = measure(config, length, arguments.contenders, arguments.rounds, arguments.accumulation)
        row = {name: round(speeds[name], 1) for name in arguments.contenders}
        for key, first, second in (("ratio", "engine", "transformers"), ("modern_ratio", "modern", "stock_modern")):
            if {first, second} <= set(row):
                row[key] = round(speeds[first] / speeds[second], 3)
        if "ours" in speeds:
            row["matmul_share"] = round(speeds["ours"] / speeds["limit"], 3)
            row["linear_share"] = round(speeds["ours"] / speeds["linear_limit"], 3)
        if not arguments.no_memory:
            for key, name in (("peak_mb", "ours"), ("transformers_peak_mb", "transformers")):
                if name in arguments.contenders:
                    row[key] = peak_megabytes(name, arguments, length)
        result[f"seq{length}"] = row
        show(length, row, speeds["limit"], speeds["linear_limit"])
    console.say(json.dumps(result))
    return 0


def show(length: int, row: dict[str, float], limit: float, linear_limit: float) -> None:
    console.say(
        f"\nsequence length {length}; matmul limit {limit:.1f} real tokens/s, "
        f"by the model's own forward product {linear_limit:.1f}"
    )
    base = row.get("transformers")
    for name in CONTENDERS:
        if name in row:
            ratio = f"{row[name] / base:5.2f}x transformers" if base else ""
            console.say(f"  {name:<13} {row[name]:7.1f} real tokens/s  {ratio}  {row[name] / limit:5.1%} of the limit")
    for key in ("peak_mb", "transformers_peak_mb"):
        if key in row:
            console.say(f"  {key}: {row[key]:.0f}")


if __name__ == "__main__":
    run_command(main)
