"""From text to an evaluated model: prepare, train with probes, export, evaluate, as a recipe says.

    python scripts/pretrain.py recipe.json --dry_run
    python scripts/pretrain.py recipe.json

Every stage is another command of this project, which is shown. After an interruption the same command resumes: finished
stages take seconds. docs/pretrain.md has the keys of a recipe.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))

from pydantic import BaseModel, ConfigDict, Field

from common.console import console
from common.errors import Problems, run_command
from common.help import Parser
from common.json_files import load_json
from common.processes import STOPPED_EXIT_CODE, USER_ERROR_EXIT_CODE, handle_stop_signals
from common.validation import validate
from common.words import counted
from training.runtime.chain import SCRIPT, Chain, launch_command

Flags = dict[str, Any]  # of one command: name without dashes → value, list of values, or true
TABLES = (".csv", ".tsv", ".jsonl")
NOT_PREPARED = "the time and memory of a step are known once the text is prepared: then --dry_run measures them"


class Recipe(BaseModel):
    """A recipe. Paths are relative to the current folder, as in all commands."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str  # of the run
    text: list[str] = Field(min_length=1)  # data.prepare's --input
    output_dir: str
    model: str  # the model JSON, whose folders are hdf5/<length> and hdf5/tokenizer
    deepspeed: str  # the DeepSpeed JSON
    max_seq_length: int = 128
    max_predictions_per_seq: int = 20
    time_budget: str | None = None  # of training
    ranks: int = Field(default=1, ge=1)
    tasks: list[str] = []  # probed during training and evaluated after it
    task_data: str | None = None  # folder of the tasks' data
    prepare: Flags = {}
    train: Flags = {}
    export: Flags = {}
    evaluate: Flags = {}


@dataclass(frozen=True)
class Stage:
    name: str
    command: list[str]
    has_dry_run: bool = False  # of its own, which shows what the stage will take
    needs: Path | None = None  # without which that cannot run
    cost: str = ""  # what is known without running anything


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="pretrain.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, metavar="RECIPE.json", help="what to do; docs/pretrain.md has its keys")
    parser.add_argument("--dry_run", action="store_true", help="show what each stage will take; write nothing")
    flags = parser.parse_args(argv)
    stages = list(stages_of(read_recipe(flags.recipe)))
    # `python -m` finds this project from any folder.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH"))))
    chain = Chain()
    with handle_stop_signals(chain.stop):
        for number, stage in enumerate(stages, start=1):
            console.say(f"== {number}/{len(stages)} {stage.name}: {shlex.join(stage.command)}")
            code = run_dry(chain, stage) if flags.dry_run else chain.run(stage.command)
            if code == 0 and chain.is_asked:
                code = STOPPED_EXIT_CODE
            if code != 0:
                fix = "fix what is reported above, in the recipe or in the files that it names"
                advice = fix if code == USER_ERROR_EXIT_CODE else "the same command resumes there"
                console.warn(f"{stage.name} ended with code {code}; {advice}")
                return code
    return 0


def run_dry(chain: Chain, stage: Stage) -> int:
    if stage.cost:
        console.say(f"  {stage.cost}")
    if not stage.has_dry_run:
        return 0
    if stage.needs is not None and not stage.needs.exists():
        console.say(f"  {NOT_PREPARED}")
        return 0
    return chain.run([*stage.command, "--dry_run"])


def read_recipe(path: Path) -> Recipe:
    problems = Problems()
    content = load_json(path, "a recipe")
    recipe = validate(Recipe, content, str(path), problems, page="docs/pretrain.md")
    problems.raise_if_any()
    assert recipe is not None
    for file in (recipe.model, recipe.deepspeed):
        if not Path(file).is_file():
            problems.add(f"{path}: {file}: no such file; expected a JSON file such as those in configs/")
    problems.raise_if_any()
    return recipe


def stages_of(recipe: Recipe) -> Iterator[Stage]:
    """The commands in their order; sections of the recipe add flags to them."""
    output = Path(recipe.output_dir)
    shards, exported = output / "data" / "hdf5", output / "model"
    prepare = python("-m", "data.prepare", **prepare_flags(recipe, shards))
    yield Stage("prepare", prepare, cost=describe_text(recipe.text))
    script = PROJECT / SCRIPT
    launcher = python(str(script)) if recipe.ranks == 1 else launch_command(script, recipe.ranks)
    budget = f"at most {recipe.time_budget} of training, restarts included" if recipe.time_budget else ""
    manifest = shards / str(recipe.max_seq_length) / "manifest.json"
    yield Stage("train", [*launcher, *words(train_flags(recipe, output))], True, manifest, budget)
    export = {
        "checkpoint": output / "saved_models" / recipe.name,
        "output": exported,
        "tokenizer": shards / "tokenizer",
        "metrics": output / "runs" / recipe.name / "metrics.jsonl",
        **recipe.export,
    }
    export_command = python(str(PROJECT / "scripts" / "export_hf.py"), **export)
    yield Stage("export", export_command, cost="seconds")
    if recipe.tasks:
        yield Stage("evaluate", python("-m", "evaluation.run", **evaluate_flags(recipe, output, exported)), True)
        yield Stage("model card", export_command, cost="seconds")  # with the results, which the export finds


def prepare_flags(recipe: Recipe, shards: Path) -> Flags:
    model = load_json(Path(recipe.model), "a model JSON").get("bert_model_config") or {}
    has_vocabulary = bool({"vocab_size", "vocab_file"} & recipe.prepare.keys())
    return {
        "input": recipe.text,
        "output_dir": shards,
        "max_seq_length": recipe.max_seq_length,
        "max_predictions_per_seq": recipe.max_predictions_per_seq,
        "vocab_size": None if has_vocabulary else model.get("vocab_size"),
        **recipe.prepare,
    }


def train_flags(recipe: Recipe, output: Path) -> Flags:
    return {
        "cf": recipe.model,
        "deepspeed_config": recipe.deepspeed,
        "job_name": recipe.name,
        "output_dir": output,
        "data_path_prefix": output / "data",
        "max_seq_length": recipe.max_seq_length,
        "max_predictions_per_seq": recipe.max_predictions_per_seq,
        "time_budget": recipe.time_budget,
        "probe": recipe.tasks or None,
        "probe_data": recipe.task_data if recipe.tasks else None,
        **recipe.train,
    }


def evaluate_flags(recipe: Recipe, output: Path, exported: Path) -> Flags:
    has_tables = any(task.endswith(TABLES) for task in recipe.tasks)
    return {
        "model": f"{recipe.name}={exported}",
        "tasks": recipe.tasks,
        "data": recipe.task_data,
        "output": output / "evaluation",
        **({"text": "text", "label": "label"} if has_tables else {}),
        **recipe.evaluate,
    }


def python(*program: str, **flags: Any) -> list[str]:
    return [sys.executable, *program, *words(flags)]


def words(flags: Flags) -> list[str]:
    """The command line of `flags`. None and false leave a flag out; it is given without a value for true."""
    found = []
    for name, value in flags.items():
        if value is not None and value is not False:
            values = value if isinstance(value, list) else [] if value is True else [value]
            found += [f"--{name}", *map(str, values)]
    return found


def describe_text(paths: Sequence[str]) -> str:
    """The amount of text among `paths`, as far as they are files and folders of this machine."""
    files = [
        file
        for path in map(Path, paths)
        for file in ([path] if path.is_file() else path.rglob("*") if path.is_dir() else [])
        if file.is_file()
    ]
    size = sum(file.stat().st_size for file in files) / 2**20
    if not files:
        return "its input is not in this machine's folders"
    return f"{counted(len(files), 'file')}, {size:,.1f} MB as stored"


if __name__ == "__main__":
    run_command(main)
