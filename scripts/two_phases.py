"""BERT's two phases as one command: train on short rows, then on long rows from the checkpoint of the first phase.

After an interruption the same command resumes the phase it was in. Flags that this command does not know are
passed on to deepspeed_train.py in both phases. With --dry_run, phase 2 is tried too once phase 1 has a checkpoint.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
from training.checkpoints.state import read_state
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
class Phase:
    """A run of deepspeed_train.py."""

    number: int
    length: int
    ranks: int | None
    start: Path | None  # where it finds its first weights
    checkpoints: CheckpointFolder
    words: list[str]  # its flags


def read_phases(argv: Sequence[str] | None) -> list[Phase]:
    """Both phases. The second starts with the weights and optimizer of the first and its own schedule."""
    flags, passed_on = build_parser().parse_known_args(argv)
    if flags.lengths[0] == flags.lengths[1]:
        raise UserError(
            f"--lengths {flags.lengths[0]} {flags.lengths[1]}: the phases must differ in length. BERT uses 128 512"
        )
    if Path(flags.name).name != flags.name or flags.name in (".", ".."):
        raise UserError(
            f"--name {flags.name!r}: it names folders, so it must be a single plain name. Pass another --name"
        )
    phases: list[Phase] = []
    for length, predictions, config in zip(flags.lengths, flags.predictions, flags.deepspeed_configs, strict=True):
        start, job_name = phases[0].checkpoints.folder if phases else None, f"{flags.name}_{length}"
        words = [
            *("--cf", str(flags.config_file), "--deepspeed_config", str(config)),
            *("--output_dir", str(flags.output_dir), "--job_name", job_name),
            *("--max_seq_length", str(length), "--max_predictions_per_seq", str(predictions), *passed_on),
        ]
        if start is not None:
            words += ["--load_training_checkpoint", str(start), "--rewarmup"]
        checkpoints = CheckpointFolder(flags.output_dir / "saved_models" / job_name)
        phases.append(Phase(len(phases) + 1, length, flags.ranks, start, checkpoints, words))
    return phases


def main(argv: Sequence[str] | None = None) -> int:
    first, second = read_phases(argv)
    remaining = remaining_phases([first, second])
    checked = check_phases(remaining)
    chain = Chain()
    with handle_stop_signals(chain.stop):
        for phase, (settings, datasets) in zip(remaining, checked, strict=True):
            is_dry_run = settings.flags.training.dry_run
            if is_dry_run and phase is second and not any(one.checkpoints.newest_valid() for one in (first, second)):
                console.say("phase 2: flags, files and data are valid; it can be tried once phase 1 has a checkpoint")
                break
            console.say(f"== phase {phase.number}: rows of {phase.length}")
            code = chain.run([*launch_command(PROJECT / SCRIPT, phase.ranks), *phase.words])
            if code == 0 and not is_dry_run and not is_finished(phase, settings, datasets):
                code = UNFINISHED_EXIT_CODE
            if code == 0 and chain.is_asked and phase is not second:
                code = STOPPED_EXIT_CODE
            if code != 0:
                console.warn(f"phase {phase.number} ended with code {code}; {advise(code, is_dry_run)}")
                return code
    return 0


def advise(code: int, is_dry_run: bool) -> str:
    """What the same command would do after a phase that ended with `code`."""
    if code == USER_ERROR_EXIT_CODE:
        return "fix what is reported above: the same command would end the same way"
    return "nothing was written" if is_dry_run else "the same command resumes from its last checkpoint"


def remaining_phases(phases: list[Phase]) -> list[Phase]:
    """The phases still to run: only phase 2 once it has its own checkpoint."""
    return phases[1:] if phases[1].checkpoints.newest_valid() else phases


def rank_info_of(phase: Phase) -> RankInfo:
    ranks = phase.ranks or max(1, torch.cuda.device_count())
    return RankInfo(0, 0, ranks, ranks)


def check_phases(phases: Sequence[Phase]) -> list[tuple[Settings, Datasets]]:
    """Raise the mistakes of all phases at once, not those of the second after the first has been trained."""
    checked, states, problems = [], [], Problems()
    for phase in phases:
        try:
            words, wrong = read_arguments(phase.words)
            settings, datasets = prepare_run(words, rank_info_of(phase), wrong)
            checked.append((settings, datasets))
            states.append(first_state(settings, rank_info_of(phase), datasets))
        except UserError as error:
            for part in error.parts:
                if not part.startswith(f"{phase.start}: no such folder"):  # phase 1 will write it
                    problems.add(f"phase {phase.number}: {part}")
    if len(states) == 2:
        for mismatch in find_mismatches(*states):
            problems.add(f"phase 2 cannot start from phase 1's checkpoint, which {mismatch}")
    problems.raise_if_any()
    return checked


def is_finished(phase: Phase, settings: Settings, datasets: Datasets) -> bool:
    """Whether the phase's newest checkpoint is its last."""
    newest = phase.checkpoints.newest_valid()
    if newest is None:
        return False
    state = read_state(phase.checkpoints.folder / newest)
    return is_run_finished(settings, rank_info_of(phase).world_size, datasets, state)


if __name__ == "__main__":
    run_command(main)
