"""What a run needs before anything is built: checked settings and opened data. All problems are reported at once."""

from pathlib import Path

from common.errors import Problems
from common.stores import Store
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.remote import FLAG as UPLOAD_FLAG
from training.export.folder import check_export_folder
from training.guesses import read_sentences
from training.inputs.datasets import Datasets, open_data
from training.probing import check_probes
from training.runtime.ranks import RankInfo
from training.settings.data_folders import open_cache
from training.settings.flags import CommandLine
from training.settings.resolve import DataRequest, Settings, resolve_settings


def prepare_run(flags: CommandLine, rank_info: RankInfo, problems: Problems) -> tuple[Settings, Datasets]:
    """The settings and the data of a run. `problems` are those of the command line.

    Reading a wrongly given flag raises Unsure, so each is read where it is attempted.
    """

    def check_inputs(request: DataRequest | None) -> None:
        problems.attempt(lambda: _check_other_run(flags.checkpoints.load_training_checkpoint))
        if request is not None:
            open_data(request, rank_info, cache, is_trial=True)

    cache = problems.attempt(lambda: open_cache(flags.data, rank_info.local_size, problems))
    problems.attempt(lambda: _check_export(flags.checkpoints.export_dir, problems))
    problems.attempt(lambda: _check_upload(flags.checkpoints.upload_checkpoints))
    problems.attempt(lambda: _check_sentences(flags.training.sample_sentences))
    problems.attempt(lambda: check_probes(flags.probes, flags.checkpoints.keep_best_by))
    settings = resolve_settings(flags, rank_info, problems, check_inputs, cache)
    return settings, open_data(settings.data, rank_info, cache)


def _check_export(export_dir: Path | None, problems: Problems) -> None:
    if export_dir is not None:
        check_export_folder(export_dir, "--export_dir", problems)


def _check_upload(url: str | None) -> None:
    if url is not None:
        Store(url, UPLOAD_FLAG)


def _check_sentences(path: Path | None) -> None:
    if path is not None:
        read_sentences(path)


def _check_other_run(folder: Path | None) -> None:
    """A run with checkpoints of its own does not need that folder, so its absence alone is not an error."""
    if folder is not None:
        CheckpointFolder(folder).check_exists()
