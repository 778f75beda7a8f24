"""What a run needs before anything is built: checked settings and opened data. All problems are reported at once."""

from dataclasses import replace
from functools import partial

from common.errors import Problems
from training.checkpoints.folder import CheckpointFolder
from training.export.folder import check_export_folder
from training.guesses import read_sentences
from training.inputs.datasets import Datasets, open_data
from training.probing import check_probes
from training.runtime.ranks import RankInfo
from training.settings.flags import CommandLine
from training.settings.resolve import DataRequest, Settings, resolve_settings


def prepare_run(flags: CommandLine, rank_info: RankInfo, problems: Problems) -> tuple[Settings, Datasets]:
    """The settings and the data of a run. `problems` are those of the command line."""
    problems.attempt(partial(_check_export, flags, problems))
    problems.attempt(partial(_check_sentences, flags))
    problems.attempt(partial(_check_probes, flags))
    settings = resolve_settings(flags, rank_info, problems, partial(_check_inputs, flags, rank_info, problems))
    return settings, open_data(settings.data, rank_info)


def _check_export(flags: CommandLine, problems: Problems) -> None:
    if flags.checkpoints.export_dir is not None:
        check_export_folder(flags.checkpoints.export_dir, "--export_dir", problems)


def _check_sentences(flags: CommandLine) -> None:
    if flags.training.sample_sentences is not None:
        read_sentences(flags.training.sample_sentences)


def _check_probes(flags: CommandLine) -> None:
    check_probes(flags.probes, flags.checkpoints.keep_best_by)


def _check_inputs(flags: CommandLine, rank_info: RankInfo, problems: Problems, request: DataRequest | None) -> None:
    """Find the problems of another run's checkpoints and of the data, if the settings have problems already."""
    problems.attempt(partial(_check_other_run, flags))
    if request is not None:
        # Without a tokenizer the vocabulary size is the JSON's, which may be what is wrong.
        vocab_size = None if request.tokenizer_digest is None else request.vocab_size
        open_data(replace(request, vocab_size=vocab_size, verify=False), rank_info)


def _check_other_run(flags: CommandLine) -> None:
    """A run with checkpoints of its own does not need that folder, so its absence alone is not an error."""
    if flags.checkpoints.load_training_checkpoint is not None:
        CheckpointFolder(flags.checkpoints.load_training_checkpoint).check_exists()
