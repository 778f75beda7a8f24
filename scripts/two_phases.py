"""BERT's two phases as one command: train on short rows, then on long rows from the checkpoint of the first phase.

After an interruption the same command resumes the phase it was in. Flags that this command does not know are
passed on to deepspeed_train.py in both phases. With --dry_run, phase 2 is tried too once phase 1 has a checkpoint.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))

from common.hardware import choose_accelerator

if __name__ == "__main__":
    choose_accelerator()

import torch

from common.console import console
from common.errors import Problems, UserError, run_command
from common.help import Parser, positive_int
from common.processes import STOPPED_EXIT_CODE, USER_ERROR_EXIT_CODE, handle_stop_signals
from training.build import first_state
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.resume import find_mismatches
from training.checkpoints.state import TrainingState, read_state
from training.clock import is_run_finished
from training.inputs.datasets import Datasets
from training.preflight import prepare_run
from training.runtime.chain import SCRIPT, Chain, launch_command
from training.runtime.ranks import RankInfo
from training.settings.flags import read_arguments
from training.settings.resolve import Settings

UNFINISHED_EXIT_CODE = 1  # of a phase whose launcher ends with 0 before the last step: it was killed


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="two_phases.py", description=__doc__)
    add = parser.add_argument
    add("--config-file", "--cf", type=Path, required=True, metavar="FILE", help="the model JSON")
    configs = "the DeepSpeed JSON of each phase: long rows need smaller micro-batches"
    add("--deepspeed_configs", type=Path, nargs=2, required=True, metavar="FILE", help=configs)
    add("--output_dir", type=Path, required=True, metavar="DIR", help="where both phases write")
    add("--name", required=True, help="the runs' names are NAME_128 and NAME_512")
    lengths = "tokens per row (default: 128 512)"
    add("--lengths", type=positive_int, nargs=2, default=[128, 512], metavar="S", help=lengths)
    predictions = "masks per row (default: 20 80)"
    add("--predictions", type=positive_int, nargs=2, default=[20, 80], metavar="P", help=predictions)
    add("--ranks", type=positive_int, metavar="N", help="ranks on this machine (default: one per GPU)")
    return parser


@dataclass(frozen=True)
class Request:
    """What the command line asks for; pairs have a value for each phase."""

    config_file: Path
    deepspeed_configs: tuple[Path, Path]
    output_dir: Path
    name: str
    lengths: tuple[int, int]
    predictions: tuple[int, int]
    ranks: int | None
    passed_on: tuple[str, ...]  # flags of deepspeed_train.py

    @classmethod
    def parse(cls, argv: Sequence[str] | None) -> "Request":
        known, passed_on = build_parser().parse_known_args(argv)
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in vars(known).items()
        }
        return cls(**values, passed_on=tuple(passed_on))


def main(argv: Sequence[str] | None = None) -> int:
    request = Request.parse(argv)
    phases = remaining_phases(request)
    checked = check_phases(request, phases)
    chain = Chain()
    with handle_stop_signals(chain.stop):
        for phase in phases:
            is_dry_run = checked[phase].settings.training_flags.dry_run
            if is_dry_run and not has_start(request, phase):
                console.say("phase 2: flags, files and data are valid; it can be tried once phase 1 has a checkpoint")
                break
            console.say(f"== phase {phase + 1}: rows of {request.lengths[phase]}")
            code = chain.run([*launch_command(PROJECT / SCRIPT, request.ranks), *phase_words(request, phase)])
            if code == 0 and not is_dry_run and not is_finished(request, phase, checked[phase]):
                code = UNFINISHED_EXIT_CODE
            if code == 0 and chain.is_asked and phase != phases[-1]:
                code = STOPPED_EXIT_CODE
            if code != 0:
                console.warn(f"phase {phase + 1} ended with code {code}; {advise(code, is_dry_run)}")
                return code
    return 0


def advise(code: int, is_dry_run: bool) -> str:
    """What the same command would do after a phase that ended with `code`."""
    if code == USER_ERROR_EXIT_CODE:
        return "fix what is reported above: the same command would end the same way"
    return "nothing was written" if is_dry_run else "the same command resumes from its last checkpoint"


def job_name(request: Request, phase: int) -> str:
    return f"{request.name}_{request.lengths[phase]}"


def checkpoints_of(request: Request, phase: int) -> CheckpointFolder:
    return CheckpointFolder(request.output_dir / "saved_models" / job_name(request, phase))


def remaining_phases(request: Request) -> tuple[int, ...]:
    """The phases still to run: only phase 2 once it has its own checkpoint."""
    if request.lengths[0] == request.lengths[1]:
        raise UserError(
            f"--lengths {request.lengths[0]} {request.lengths[1]}: the phases must differ in length. BERT uses 128 512"
        )
    if Path(request.name).name != request.name or request.name in (".", ".."):
        raise UserError(
            f"--name {request.name!r}: it names folders, so it must be a single plain name. Pass another --name"
        )
    return (1,) if checkpoints_of(request, 1).newest_valid() else (0, 1)


@dataclass(frozen=True)
class CheckedPhase:
    """A phase whose flags, files and data are valid."""

    settings: Settings
    datasets: Datasets
    rank_info: RankInfo


def check_phases(request: Request, phases: Sequence[int]) -> dict[int, CheckedPhase]:
    """Raise the mistakes of all phases at once, not those of the second after the first has been trained."""
    ranks = request.ranks or max(1, torch.cuda.device_count())
    rank_info = RankInfo(0, 0, ranks, ranks)
    first_run = checkpoints_of(request, 0).folder
    states: dict[int, TrainingState] = {}
    checked, problems = {}, Problems()
    for phase in phases:
        try:
            words, wrong = read_arguments(phase_words(request, phase))
            settings, datasets = prepare_run(words, rank_info, wrong)
            checked[phase] = CheckedPhase(settings, datasets, rank_info)
            states[phase] = first_state(settings, rank_info, datasets)
        except UserError as error:
            for part in error.parts:
                if not part.startswith(f"{first_run}: no such folder"):  # phase 1 will write it
                    problems.add(f"phase {phase + 1}: {part}")
    if {0, 1} <= states.keys():
        for mismatch in find_mismatches(states[0], states[1]):
            problems.add(f"phase 2 cannot start from phase 1's checkpoint, which {mismatch}")
    problems.raise_if_any()
    return checked


def is_finished(request: Request, phase: int, checked: CheckedPhase) -> bool:
    """Whether the phase's newest checkpoint is its last."""
    checkpoints = checkpoints_of(request, phase)
    newest = checkpoints.newest_valid()
    if newest is None:
        return False
    state = read_state(checkpoints.folder / newest)
    return is_run_finished(checked.settings, checked.rank_info.world_size, checked.datasets, state)


def has_start(request: Request, phase: int) -> bool:
    """Whether the phase can start: the first always, the second from a checkpoint of either phase."""
    return phase == 0 or any(checkpoints_of(request, number).newest_valid() for number in (0, 1))


def phase_words(request: Request, phase: int) -> list[str]:
    """The flags of a phase. Phase 2 starts with the weights and optimizer of phase 1 and its own schedule."""
    words = [
        *("--cf", str(request.config_file), "--deepspeed_config", str(request.deepspeed_configs[phase])),
        *("--output_dir", str(request.output_dir), "--job_name", job_name(request, phase)),
        *("--max_seq_length", str(request.lengths[phase])),
        *("--max_predictions_per_seq", str(request.predictions[phase]), *request.passed_on),
    ]
    if phase == 1:
        words += ["--load_training_checkpoint", str(checkpoints_of(request, 0).folder), "--rewarmup"]
    return words


if __name__ == "__main__":
    run_command(main)
