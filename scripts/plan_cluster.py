"""Plan a run on a cluster: memory per rank, time of a step, hours, cost and the settings to use.

docs/planning.md has the formulas, and how far they are from what was published and measured.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))

from common.hardware import choose_accelerator

if __name__ == "__main__":
    choose_accelerator()

from common.console import console
from common.errors import Problems, UserError, run_command
from common.help import HelpFormatter, Parser, positive_float, positive_int
from training.planning.accelerators import MEASURED_HERE, Cluster, find_accelerator, parse_gpus, read_table
from training.planning.inputs import describe_lengths, measure_lengths, read_engine, read_model
from training.planning.measure import measure_here
from training.planning.plan import Plan
from training.planning.published import published_table
from training.planning.report import as_json, format_report
from training.settings.deepspeed_file import load_deepspeed_file


def build_parser() -> Parser:
    parser = Parser(prog="plan_cluster.py", description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--config-file", "--cf", type=Path, required=True, metavar="FILE", help="the model JSON")
    add("--deepspeed_config", type=Path, required=True, metavar="FILE", help="the DeepSpeed JSON")
    gpus_help = f"GPUs per node, nodes and accelerator: 8x128:H100, 8:A100-80; 2:{MEASURED_HERE} measures this machine"
    add("--gpus", required=True, metavar="GxN:NAME", help=gpus_help)
    add("--accelerators", type=Path, metavar="FILE", help="a table that replaces or extends the shipped one")
    add("--max_seq_length", type=positive_int, default=512, metavar="S", help="tokens in a row")
    add("--max_predictions_per_seq", type=positive_int, metavar="P", help="masked tokens in a row (default: 15 %%)")
    add("--mean_tokens", type=positive_float, metavar="T", help="real tokens in an average row (default: all)")
    add("--data_path_prefix", type=Path, metavar="DIR", help="take lengths from the model JSON's shards below DIR")
    add("--precision", choices=("fp32", "fp16", "bf16"), help="(default: the DeepSpeed JSON's)")
    add("--preln", action=argparse.BooleanOptionalAction, default=True, help="layer norm before each branch")
    add("--max_steps", type=positive_int, metavar="N", help="end after N steps (default: the model JSON's)")
    add("--dollars_per_gpu_hour", type=positive_float, metavar="D", help="to compute the cost")
    add("--save_every_minutes", type=positive_float, default=30.0, metavar="N", help="between two checkpoints")
    add("--keep_last", type=positive_int, metavar="N", help="checkpoints kept (default: all)")
    rate_help = "what the shared file system writes"
    add("--file_system_gb_per_s", type=positive_float, default=2.0, metavar="G", help=rate_help)
    add("--write", type=Path, metavar="FILE", help="write the recommended DeepSpeed JSON")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    add("--published", action=PublishedAction, help="print published figures against predicted ones, and end")
    return parser


class PublishedAction(argparse.Action):
    """Like --help: needs no other flag."""

    def __init__(self, **options: object) -> None:
        super().__init__(**{**options, "nargs": 0})  # type: ignore[arg-type]

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        console.say("\n".join(published_table()))
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    flags, problems = build_parser().parse_args(argv), Problems()
    table = problems.attempt(lambda: read_table(flags.accelerators)) or {}
    # A problem with the accelerator's name leaves the number of GPUs known, for the checks that need it.
    name, gpus_per_node, nodes = problems.attempt(lambda: parse_gpus(flags.gpus)) or (MEASURED_HERE, 1, 1)
    is_measured = name.lower() == MEASURED_HERE
    accelerator = problems.attempt(lambda: find_accelerator(name, table)) if table and not is_measured else None
    model = problems.attempt(lambda: read_model(flags.config_file, flags.max_seq_length))
    engine = problems.attempt(lambda: read_engine(flags.deepspeed_config, gpus_per_node * nodes))
    if model is not None and flags.data_path_prefix is not None:
        folders = model.folders
        data = problems.attempt(lambda: measure_lengths(flags.data_path_prefix, folders, flags.max_seq_length))
    else:
        data = problems.attempt(
            lambda: describe_lengths(flags.max_seq_length, flags.mean_tokens, flags.max_predictions_per_seq)
        )
    problems.attempt(lambda: check_target(flags.write))
    problems.raise_if_any()
    assert model is not None
    assert engine is not None
    assert data is not None
    accelerator = accelerator or measure_here(model.config, gpus_per_node)
    plan = Plan(
        model,
        data,
        engine,
        Cluster(accelerator, gpus_per_node, nodes),
        table,
        precision=flags.precision or engine.precision,
        is_pre_ln=flags.preln,
        max_steps=flags.max_steps,
        dollars_per_gpu_hour=flags.dollars_per_gpu_hour,
        save_every_minutes=flags.save_every_minutes,
        keep_last=flags.keep_last,
        file_system_gb_per_s=flags.file_system_gb_per_s,
    )
    if flags.write is not None:
        flags.write.write_text(json.dumps(plan.deepspeed_json(), indent=2) + "\n", encoding="utf-8")
        load_deepspeed_file(flags.write, plan.cluster.world_size)  # refuses what the launcher would refuse
    if flags.json:
        console.say(json.dumps(as_json(plan)))
        return 0
    console.say("\n".join(format_report(plan)))
    if flags.write is not None:
        console.say(f"written: {flags.write}")
    return 0


def check_target(path: Path | None) -> None:
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise UserError(f"--write {path}: expected a file in a folder that exists; create the folder, or give another")


if __name__ == "__main__":
    run_command(main)
