"""Write a Hugging Face folder from a checkpoint: safetensors, config, tokenizer files and a model card."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training.runtime.starting import choose_accelerator

if __name__ == "__main__":
    choose_accelerator()

from common.console import console
from common.errors import run_command
from common.help import Parser
from data.tokenizer import load_tokenizer
from training.checkpoints.state import read_state
from training.export.card_facts import CardRequest
from training.export.hugging_face import check_tokenizer, export_checkpoint, locate_checkpoint


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="export_hf.py", description=__doc__)
    group = parser.add_argument_group("required")
    group.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="DIR",
        help="a checkpoint, or a run's saved_models/<job_name> folder for its newest valid one",
    )
    group.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="the Hugging Face folder to write: a new one, an empty one, or an earlier export",
    )
    group = parser.add_argument_group("optional")
    group.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="a tokenizer folder or file to include; without it the export has no tokenizer",
    )
    group.add_argument(
        "--metrics",
        type=Path,
        metavar="FILE",
        help="metrics.jsonl for the figures on the model card (default: that of the checkpoint's run)",
    )
    group.add_argument("--license", metavar="ID", help="the model card's licence, as Hugging Face names it: apache-2.0")
    group.add_argument("--language", metavar="CODES", help="the model card's languages, separated by commas: en,de")
    return parser


def find_metrics(checkpoint: Path) -> Path | None:
    """metrics.jsonl of the run that wrote OUTPUT/saved_models/JOB/step_N, if it exists."""
    job = checkpoint.absolute().parent
    metrics = job.parent.parent / "runs" / job.name / "metrics.jsonl"
    return metrics if metrics.is_file() else None


def main(argv: Sequence[str] | None = None) -> int:
    flags = build_parser().parse_args(argv)
    checkpoint = locate_checkpoint(flags.checkpoint)
    tokenizer = None if flags.tokenizer is None else load_tokenizer(flags.tokenizer)
    if tokenizer is not None:
        check_tokenizer(tokenizer, read_state(checkpoint), f"--tokenizer {flags.tokenizer}")
    metrics, request = flags.metrics or find_metrics(checkpoint), CardRequest(flags.license, flags.language)
    state = export_checkpoint(checkpoint, flags.output, tokenizer, metrics, request=request)
    console.say(f"{checkpoint} (step {state.step}) exported to {flags.output}")
    if tokenizer is None:
        console.say("note: the export has no tokenizer, which its users need; pass --tokenizer to include one")
    return 0


if __name__ == "__main__":
    run_command(main)
