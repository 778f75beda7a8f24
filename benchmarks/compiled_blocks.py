"""The gain of --compile: forward and backward with and without it, alternating; BERT-base shapes, few layers.

The last line is JSON: for each dropout and length, median and best seconds of both, and their ratio (plain / compiled).
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.batches import Batch, make_batch
from benchmarks.timing import clock
from common.console import console
from common.errors import UserError, run_command
from nvidia.compiling import compile_blocks, find_compiler_problem
from nvidia.config import BertConfig
from nvidia.cpu.startup import configure_onednn
from nvidia.modelingpreln import BertForPreTrainingPreLN

VOCAB_SIZE = 1000  # the head is the same in both
SHAPES = ((12, 128, 0.9), (3, 512, 0.75))  # rows, length, share of real tokens


def build(dropout: float, layers: int, compiled: bool) -> BertForPreTrainingPreLN:
    torch.manual_seed(0)
    model = BertForPreTrainingPreLN(
        BertConfig(
            vocab_size=VOCAB_SIZE,
            num_hidden_layers=layers,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )
    if compiled:
        compile_blocks(model)
    return model


def seconds_of(model: BertForPreTrainingPreLN, batches: Sequence[Batch]) -> float:
    """Seconds of one pass over `batches`, whose numbers of real tokens vary as in training."""
    start = clock()
    for batch in batches:
        model.zero_grad(set_to_none=True)
        model(batch).backward()
    return clock() - start


def measure(dropout: float, rows: int, length: int, fullness: float, flags: argparse.Namespace) -> dict[str, float]:
    models = {name: build(dropout, flags.layers, name == "compiled") for name in ("plain", "compiled")}
    batches = [make_batch(rows - more, length, fullness, VOCAB_SIZE + 999, length, seed=more) for more in (0, 1)]
    batches = [batch._replace(input_ids=batch.input_ids % VOCAB_SIZE) for batch in batches]
    batches = [batch._replace(masked_lm_labels=batch.masked_lm_labels.clamp(max=VOCAB_SIZE - 1)) for batch in batches]
    for model in models.values():  # compiles
        seconds_of(model, batches)
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(flags.rounds):
        for name in sorted(models, reverse=turn % 2 == 1):
            times[name].append(seconds_of(models[name], batches))
    figures = {f"{name}_median": round(statistics.median(found), 3) for name, found in times.items()}
    figures |= {f"{name}_best": round(min(found), 3) for name, found in times.items()}
    figures["ratio_median"] = round(figures["plain_median"] / figures["compiled_median"], 3)
    figures["ratio_best"] = round(figures["plain_best"] / figures["compiled_best"], 3)
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    flags = parser.parse_args(argv)
    configure_onednn()
    if (reason := find_compiler_problem("cpu")) is not None:
        raise UserError(reason)
    results = {}
    for dropout in (0.1, 0.0):
        for shape in SHAPES:
            name = f"seq{shape[1]}_dropout{dropout}"
            results[name] = measure(dropout, *shape, flags)
            console.say(f"{name}: {results[name]}")
    console.say(json.dumps(results))
    return 0


if __name__ == "__main__":
    run_command(main)
