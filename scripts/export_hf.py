"""Write a Hugging Face folder from a checkpoint: safetensors, config, tokenizer files and a model card."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.hardware import choose_accelerator

if __name__ == "__main__":
    choose_accelerator()

from common.console import console
from common.errors import UserError, run_command
from common.help import Parser
from common.json_files import load_json
from data.tokenizer import BertTokenizer, load_tokenizer
from evaluation.results import REPORT
from training.checkpoints.paths import MODEL_JSON, RESOLVED
from training.checkpoints.state import read_state
from training.export.hugging_face import check_tokenizer, describe_checkpoint, export_checkpoint, locate_checkpoint
from training.export.model_card import CardRequest


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="export_hf.py", description=__doc__)
    add = parser.add_argument_group("required").add_argument
    checkpoint = "a checkpoint, or a run's saved_models/<job_name> folder"
    add("--checkpoint", type=Path, required=True, metavar="DIR", help=checkpoint)
    output = "the Hugging Face folder to write: a new one, an empty one, or an earlier export"
    add("--output", type=Path, required=True, metavar="DIR", help=output)
    add = parser.add_argument_group("optional").add_argument
    which = "which checkpoint of the run's folder (default: the best if the run kept it, else the last)"
    add("--export", choices=("best", "last"), help=which)
    tokenizer = "a tokenizer folder or file to include (default: the one that the run used)"
    add("--tokenizer", type=Path, metavar="PATH", help=tokenizer)
    metrics = "metrics.jsonl for the figures on the model card (default: that of the checkpoint's run)"
    add("--metrics", type=Path, metavar="FILE", help=metrics)
    evaluation = (
        "output folder of evaluation.run with results of this model for the model card (default: a folder named "
        "evaluation or evaluated in or beside the export, or in the run's --output_dir)"
    )
    add("--evaluation", type=Path, metavar="DIR", help=evaluation)
    add("--license", metavar="ID", help="the model card's licence, as Hugging Face names it: apache-2.0")
    language = "the model card's languages, separated by commas: en,de (default: what the data's preparation knows)"
    add("--language", metavar="CODES", help=language)
    return parser


def find_metrics(checkpoint: Path) -> Path | None:
    """metrics.jsonl of the run that wrote OUTPUT/saved_models/JOB/step_N, if it exists."""
    job = checkpoint.absolute().parent
    metrics = job.parent.parent / "runs" / job.name / "metrics.jsonl"
    return metrics if metrics.is_file() else None


def find_report(folder: Path) -> Path:
    if not (folder / REPORT).is_file():
        raise UserError(
            f"--evaluation {folder}: has no {REPORT}; expected an output folder of evaluation.run; give its --output"
        )
    return folder / REPORT


def choose_tokenizer(given: Path | None, checkpoint: Path) -> BertTokenizer | str:
    """The given tokenizer or that of the run, or why the latter cannot be included: weights are exported without it."""
    if given is not None:
        return load_checked(given, f"--tokenizer {given}", checkpoint)
    try:
        resolved = load_json(checkpoint / RESOLVED, "the resolved config of a run")
        model = resolved.get("model") or load_json(checkpoint / MODEL_JSON, "the model JSON of a run")
        flags = resolved.get("flags") or {}
        name = model.get("bert_token_file")
        if name is None and model.get("bert_model_config") is None:  # the model and its tokenizer are those of a folder
            name = flags.get("use_pretrain") or model.get("bert_model_file")
        if not isinstance(name, str):
            return "the run's model JSON names no bert_token_file"
        paths = (Path(str(flags.get("data_path_prefix", ""))) / name, Path(name))
        path = next((path for path in paths if path.exists()), None)
        if path is None:
            return f"the run's tokenizer {paths[0]} does not exist here"
        return load_checked(path, f"{path}, the bert_token_file of the run", checkpoint)
    except UserError as error:
        return str(error)


def load_checked(path: Path, label: str, checkpoint: Path) -> BertTokenizer:
    tokenizer = load_tokenizer(path)
    check_tokenizer(tokenizer, read_state(checkpoint), label)
    return tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    flags = build_parser().parse_args(argv)
    checkpoint = locate_checkpoint(flags.checkpoint, flags.export)
    found = choose_tokenizer(flags.tokenizer, checkpoint)
    tokenizer = None if isinstance(found, str) else found
    metrics, request = flags.metrics or find_metrics(checkpoint), CardRequest(flags.license, flags.language)
    evaluation = None if flags.evaluation is None else find_report(flags.evaluation)
    state = export_checkpoint(checkpoint, flags.output, tokenizer, metrics, request=request, evaluation=evaluation)
    console.say(f"{checkpoint} ({describe_checkpoint(checkpoint, state, metrics)}) exported to {flags.output}")
    if isinstance(found, str):
        console.say(f"note: the export has no tokenizer, which its users need ({found}); pass --tokenizer")
    return 0


if __name__ == "__main__":
    run_command(main)
