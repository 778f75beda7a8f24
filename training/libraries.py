"""The libraries that compute matrix products and attention on a CPU: measured when a run starts, then kept.

Libraries differ in the last bits of a result. So a resumed run uses those of its checkpoint, a run that is restarted
before its first checkpoint those that it recorded in its folder, and all ranks those of rank 0. Another kind of
processor measures again.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError

from common.console import console
from common.files import write_plainly
from nvidia.cpu.libraries import VARIABLE, Libraries, describe_processor, forced_libraries, use
from nvidia.fastest import Measured, describe_libraries, measure_libraries
from training.checkpoints.paths import CPU_LIBRARIES
from training.checkpoints.resume import ResumePoint
from training.checkpoints.state import TrainingState, read_state
from training.runtime import collectives
from training.runtime.precision import DTYPES
from training.settings.resolve import Settings

Record = tuple[str, Libraries]  # the kind of processor, and what was chosen for it
MAY_DIFFER = "results may differ from those before in their last bits"


def all_ranks_choose_libraries(
    fresh: TrainingState, point: ResumePoint | None, settings: Settings, device: torch.device
) -> tuple[TrainingState, str]:
    """Choose and set the libraries of this rank. Returns `fresh` with the choice of rank 0, and its description."""
    if device.type != "cpu":
        use(Libraries())
        return fresh, "torch"
    largest = max(settings.lengths, key=lambda length: length.micro * length.length)
    shape = (largest.micro, largest.length)
    measure = partial(measure_libraries, settings.model_config, *shape, DTYPES[settings.precision])
    processor, folder = describe_processor(), settings.saved_models

    def choose() -> tuple[Record | None, str]:
        own = point.path if point is not None and point.is_own else None
        record, words = choose_libraries(read_record(folder, own), processor, measure, is_resumed=own is not None)
        if record is not None and not settings.flags.training.dry_run:
            write_plainly(folder / CPU_LIBRARIES, json.dumps([record[0], asdict(record[1])]) + "\n")
        return record, words

    record, words = collectives.all_ranks_from_main(choose)
    if record is None:
        use(Libraries())
        return fresh, words
    processors = sorted(set(collectives.all_ranks_gather(processor)))
    if len(processors) > 1:
        console.warn(
            f"the ranks have different processors ({'; '.join(processors)}): those unlike rank 0's measure the fastest "
            f"libraries for themselves, so a resumed run may differ in its last bits; set {VARIABLE}=torch to avoid it"
        )
    use(record[1] if processor == record[0] else measure().libraries)
    return replace(fresh, processor=record[0], cpu_libraries=record[1]), words


def choose_libraries(
    record: Record | None, processor: str, measure: Callable[[], Measured], is_resumed: bool
) -> tuple[Record | None, str]:
    """The choice for this processor, and its description. None: the model is too small for it to matter.

    `record`: the choice of this run before, if it is known.
    """
    forced = forced_libraries()
    if forced is not None:
        if record is not None and record[1] != forced:
            console.say(f"note: {VARIABLE} names other libraries than this run has used; {MAY_DIFFER}")
        return (processor, forced), f"{forced.forward}, by {VARIABLE}"
    if record is not None and record[0] == processor:
        return record, f"{describe_libraries(record[1])}, as before"
    measured = measure()
    if not measured.seconds:
        return None, "torch"
    if record is not None:
        console.say(f"note: this run was on another processor ({record[0]}; now {processor}); {MAY_DIFFER}")
    elif is_resumed:
        console.say(f"note: the checkpoint does not say which libraries computed matrix products; {MAY_DIFFER}")
    return (processor, measured.libraries), measured.describe()


def read_record(folder: Path, checkpoint: Path | None) -> Record | None:
    """The choice of this run before: of the checkpoint it resumes from, else as recorded in the run's folder."""
    if checkpoint is not None:
        state = read_state(checkpoint)
        return (state.processor, state.cpu_libraries) if state.processor and state.cpu_libraries else None
    try:
        return TypeAdapter(Record).validate_json((folder / CPU_LIBRARIES).read_bytes())
    except (OSError, ValidationError):
        return None
