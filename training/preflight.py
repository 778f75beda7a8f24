"""What a run needs before anything is built: checked settings and opened data. All problems are reported at once."""

from collections.abc import Callable
from typing import TypeVar

from common.errors import Problems
from common.stores import Store
from training.checkpoints.folder import CheckpointFolder
from training.checkpoints.remote import FLAG as UPLOAD_FLAG
from training.export.hugging_face import check_export_folder
from training.guesses import read_sentences
from training.inputs.datasets import Datasets, open_data
from training.probing import check_probes
from training.runtime.ranks import RankInfo
from training.settings.data_folders import open_cache
from training.settings.flags import CommandLine
from training.settings.resolve import DataRequest, Settings, resolve_settings

T = TypeVar("T")


def prepare_run(flags: CommandLine, rank_info: RankInfo, problems: Problems) -> tuple[Settings, Datasets]:
    """The settings and the data of a run. `problems` are those of the command line.

    Reading a wrongly given flag raises Unsure, so each is read where it is attempted.
    """

    def check_given(read: Callable[[], T | None], check: Callable[[T], object]) -> None:
        problems.attempt(lambda: None if (value := read()) is None else check(value))

    def check_inputs(request: DataRequest | None) -> None:
        """Find the problems of what a run reads, if the settings have problems already."""
        # A run with checkpoints of its own does not need that folder, so its absence alone is not an error.
        check_given(
            lambda: flags.checkpoints.load_training_checkpoint, lambda folder: CheckpointFolder(folder).check_exists()
        )
        if request is not None:
            open_data(request, rank_info, cache, is_trial=True)

    cache = problems.attempt(lambda: open_cache(flags.data, rank_info.local_size, problems))
    check_given(
        lambda: flags.checkpoints.export_dir, lambda folder: check_export_folder(folder, "--export_dir", problems)
    )
    check_given(lambda: flags.checkpoints.upload_checkpoints, lambda url: Store(url, UPLOAD_FLAG))
    check_given(lambda: flags.training.sample_sentences, read_sentences)
    problems.attempt(lambda: check_probes(flags.probes, flags.checkpoints.keep_best_by))
    settings = resolve_settings(flags, rank_info, problems, check_inputs, cache)
    return settings, open_data(settings.data, rank_info, cache)
