"""Print the last validation loss of a run beside the unigram cross entropy of the same masked tokens."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.console import console
from common.errors import UserError, run_command
from common.help import Parser, positive_int
from data.shards.dataset import PretrainingDataset, open_dataset
from data.shards.report import text_tokens
from data.shards.statistics import count_ids, read_in_parts, smoothed_log_shares
from training.metrics.reader import A_RUNS_METRICS, last_validation

MAX_TRAINING_ROWS = 200_000  # enough to know the frequencies


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="compare_unigram.py", description=__doc__)
    parser.add_argument("--metrics", type=Path, required=True, metavar="FILE", help="metrics.jsonl of the run")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder of its shards")
    parser.add_argument("--max_seq_length", type=positive_int, default=128, metavar="S", help="default: 128")
    parser.add_argument("--max_predictions_per_seq", type=positive_int, default=20, metavar="P", help="default: 20")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    flags = build_parser().parse_args(argv)
    validation = last_validation(flags.metrics)
    if validation is None:
        raise UserError(f"{flags.metrics}: has no validation; {A_RUNS_METRICS}")
    shape = {"max_seq_length": flags.max_seq_length, "max_predictions_per_seq": flags.max_predictions_per_seq}
    unigram = unigram_cross_entropy(
        open_dataset([flags.data], split="training", **shape),
        open_dataset([flags.data], split="validation", **shape),
    )
    gain = unigram - validation["mlm_loss"]
    for label, value in (
        ("unigram cross entropy of the masked validation tokens", unigram),
        (f"validation loss of the model at step {validation['step']}", validation["mlm_loss"]),
        ("gain of the model over the unigram", gain),
    ):
        console.say(f"{label:<54}{value:7.3f} nats")
    console.say(f"masked-token accuracy{validation['mlm_accuracy']:>40.1%}")
    return 0


def unigram_cross_entropy(training: PretrainingDataset, validation: PretrainingDataset) -> float:
    """Cross entropy, in nats, of validation's masked tokens under the unigram distribution of training's tokens.

    Training tokens are the originals, without [CLS], [SEP] and padding; every count is increased by one.
    """
    counts = count_ids(text_tokens(rows) for rows in read_in_parts(training, MAX_TRAINING_ROWS))
    targets = count_ids(
        rows.masked_lm_ids[rows.masked_lm_positions > 0] for rows in read_in_parts(validation, validation.num_rows)
    )
    log_probabilities = smoothed_log_shares(counts, max(len(targets), len(counts)))
    return float(-(targets * log_probabilities[: len(targets)]).sum() / targets.sum())


if __name__ == "__main__":
    run_command(main)
