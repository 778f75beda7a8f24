"""Print a run's last validation loss beside the unigram cross entropy of the same masked tokens."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.console import console
from common.errors import UserError, run_command
from common.help import Parser, positive_int
from data.shards.dataset import open_dataset
from data.shards.statistics import unigram_cross_entropy
from training.metrics.reader import A_RUNS_METRICS, last_validation


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="compare_unigram.py", description=__doc__)
    parser.add_argument("--metrics", type=Path, required=True, metavar="FILE", help="the run's metrics.jsonl")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="the folder of its shards")
    parser.add_argument("--max_seq_length", type=positive_int, default=128, metavar="S", help="default: 128")
    parser.add_argument("--max_predictions_per_seq", type=positive_int, default=20, metavar="P", help="default: 20")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    flags = build_parser().parse_args(argv)
    validation = last_validation(flags.metrics)
    if validation is None:
        raise UserError(f"{flags.metrics}: holds no validation; {A_RUNS_METRICS}")
    shape = {"max_seq_length": flags.max_seq_length, "max_predictions_per_seq": flags.max_predictions_per_seq}
    unigram = unigram_cross_entropy(
        open_dataset([flags.data], split="training", **shape),
        open_dataset([flags.data], split="validation", **shape),
    )
    gain = unigram - validation["mlm_loss"]
    for label, value in (
        ("unigram cross entropy of the masked validation tokens", unigram),
        (f"validation loss of the model at step {validation['step']}", validation["mlm_loss"]),
        ("the model is below it by", gain),
    ):
        console.say(f"{label:<54}{value:7.3f} nats")
    console.say(f"masked tokens it gets right{validation['mlm_accuracy']:>34.1%}")
    return 0


if __name__ == "__main__":
    run_command(main)
