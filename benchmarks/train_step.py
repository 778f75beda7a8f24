"""One training step of BERT-base: ours, ours in the DeepSpeed engine, stock transformers, and a plain reference.

Further contenders by name: transformers compiled by torch.compile, and ModernBERT by ours and by stock transformers.
Every contender takes the same batches, whose rows have the lengths of real shards: forward and backward over a few
micro-batches, clipping, AdamW. Each has a process of its own, with the start-up of its own users, and they take turns,
so that other work on the machine affects all; the best round counts. The last line is JSON.
"""

import argparse
import json
import multiprocessing
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.batches import Batch, make_batch, num_tokens
from benchmarks.contenders import BUILDERS, STOCK
from benchmarks.matmul_limit import limits, seconds, step_products
from benchmarks.timing import clock
from common.console import console
from common.errors import run_command
from common.memory import keep_freed_memory, peak_resident_mib
from nvidia.config import BertConfig
from nvidia.cpu.libraries import Libraries, forced_libraries, use
from nvidia.cpu.startup import configure_onednn
from nvidia.fastest import Measured as MeasuredLibraries
from nvidia.fastest import measure_libraries

CONTENDERS = tuple(BUILDERS)
DEFAULT = ("ours", "engine", "transformers", "reference")
# length → rows of a micro-batch, predictions per row
WORKLOADS = {128: (16, 20), 512: (8, 80)}


def workload(length: int, accumulation: int, config: BertConfig) -> list[Batch]:
    rows, predictions = WORKLOADS[length]
    return [make_batch(rows, length, None, config.num_tokens, predictions, seed) for seed in range(accumulation)]


class Contender:
    """A process that takes a step when it is asked to. Use as a context manager."""

    def __init__(self, name: str, config: BertConfig, length: int, accumulation: int, libraries: Libraries) -> None:
        self._name, context = name, multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, name, config, length, accumulation, libraries)
        self._process = context.Process(target=take_steps, args=arguments, daemon=True)

    def __enter__(self) -> "Contender":
        self._process.start()
        self._connection.recv()  # it is built and warm
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def take_step(self) -> tuple[float, float]:
        """The seconds of a step, and the peak memory so far in MiB."""
        self._connection.send("step")
        return self._connection.recv()


def take_steps(
    connection: Connection, name: str, config: BertConfig, length: int, accumulation: int, libraries: Libraries
) -> None:
    """The contender's side."""
    if name not in STOCK:
        configure_onednn()
        keep_freed_memory()
        use(libraries)
    torch.manual_seed(0)
    batches = workload(length, accumulation, config)
    step = BUILDERS[name](config, accumulation)
    step(batches)  # builds what is built once, and gets the memory of a step from the system
    connection.send("ready")
    while connection.recv():
        start = clock()
        step(batches)
        connection.send((clock() - start, peak_resident_mib()))


@dataclass(frozen=True)
class Measured:
    """Real tokens per second of each contender and of the products by each library; peak memory of a contender, MiB."""

    speeds: dict[str, float]
    limits: dict[str, float]
    peaks: dict[str, float]


def measure(config: BertConfig, length: int, names: Sequence[str], rounds: int, accumulation: int) -> Measured:
    batches = workload(length, accumulation, config)
    libraries = fastest_libraries(config, WORKLOADS[length][0], length)
    best, products = dict.fromkeys(names, float("inf")), dict.fromkeys(limits(), float("inf"))
    peaks: dict[str, float] = {}
    with ExitStack() as stack:
        contenders = {
            name: stack.enter_context(Contender(name, config, length, accumulation, libraries)) for name in names
        }
        for round_number in range(rounds):
            for name in rotated(names, round_number):
                spent, peaks[name] = contenders[name].take_step()
                best[name] = min(best[name], spent)
                speed = num_tokens(batches) / spent
                console.say(f"  {length} round {round_number + 1} {name:<13} {speed:7.1f} tokens/s")
            scale = num_tokens(batches) / num_tokens(batches[:1])
            for library in products:
                limit = scale * seconds(step_products(config, batches[0]).items(), library)
                products[library] = min(products[library], limit)
    speeds, limit_speeds = (
        {name: num_tokens(batches) / spent for name, spent in times.items()} for times in (best, products)
    )
    return Measured(speeds, limit_speeds, peaks)


def fastest_libraries(config: BertConfig, rows: int, length: int) -> Libraries:
    """Choose the libraries of matrix products as a run does when it starts."""
    forced = forced_libraries()
    measured = measure_libraries(config, rows, length) if forced is None else MeasuredLibraries(forced)
    use(measured.libraries)
    console.say(f"products: {measured.describe() or measured.libraries.forward}")
    return measured.libraries


def rotated(names: Sequence[str], by: int) -> list[str]:
    """Rotate the order each round, so that no contender always follows the same other."""
    start = by % len(names)
    return [*names[start:], *names[:start]]


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
    result: dict[str, Any] = {}
    for length in arguments.lengths:
        measured = measure(config, length, arguments.contenders, arguments.rounds, arguments.accumulation)
        speeds = measured.speeds
        row = {name: round(speeds[name], 1) for name in arguments.contenders}
        for key, first, second in (("ratio", "engine", "transformers"), ("modern_ratio", "modern", "stock_modern")):
            if {first, second} <= set(row):
                row[key] = round(speeds[first] / speeds[second], 3)
        row |= {f"{library}_limit": round(limit, 1) for library, limit in measured.limits.items()}
        for name in {"ours", "engine"} & set(row):
            row[f"{name}_share"] = round(speeds[name] / max(measured.limits.values()), 3)
        for key, name in (("peak_mb", "ours"), ("transformers_peak_mb", "transformers")):
            if name in arguments.contenders and not arguments.no_memory:
                row[key] = round(measured.peaks[name])
        result[f"seq{length}"] = row
        show(length, row, measured.limits)
    console.say(json.dumps(result))
    return 0


def show(length: int, row: dict[str, float], limits: dict[str, float]) -> None:
    console.say(
        f"\nsequence length {length}; matmul limit in real tokens/s: "
        + ", ".join(f"{limit:.1f} by {library}" for library, limit in limits.items())
    )
    base, limit = row.get("transformers"), max(limits.values())
    for name in CONTENDERS:
        if name in row:
            ratio = f"{row[name] / base:5.2f}x transformers" if base else ""
            console.say(f"  {name:<13} {row[name]:7.1f} real tokens/s  {ratio}  {row[name] / limit:5.1%} of the limit")
    for key in ("peak_mb", "transformers_peak_mb"):
        if key in row:
            console.say(f"  {key}: {row[key]:.0f}")


if __name__ == "__main__":
    run_command(main)
