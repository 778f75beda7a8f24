"""--find_micro_batch: the largest micro-batch that fits in memory, found by trying.

Every rank starts a child process that builds the same model and engine and takes real steps on full rows (see
micro_batch_trial.py), so that running out of memory ends a child and not the run. The ranks exchange the outcomes: a
size fits if it fits on all of them.
"""

import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from enum import IntEnum
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from common.console import console
from common.errors import UserError
from common.memory import available_bytes
from common.words import counted
from training.checkpoints.folder import CheckpointFolder
from training.micro_batch_trial import LOST_RANK, NO_MEMORY, TrialRequest, run_trials
from training.runtime import collectives
from training.runtime.ranks import RankInfo, free_port
from training.settings.deepspeed_file import BatchSizes
from training.settings.micro_batch import find_sizes, read_found, with_micro_batch
from training.settings.resolve import Settings

FLAG = "--find_micro_batch"
MARGIN = 0.1  # of the free memory stays unused: batches differ, and so does what other programs take
EXCHANGE_SECONDS = 0.2
GIB = 2**30


class Outcome(IntEnum):
    """What the trial of one size ended with on one rank."""

    RUNNING = 0
    FITS = 1
    LOST = 2  # another rank's child ended; that rank knows why
    TOO_LARGE = 3
    FAILED = 4


def all_ranks_find_micro_batch(
    settings: Settings, rank_info: RankInfo, device: torch.device, note: Callable[[str, int], None]
) -> Settings:
    """The settings with the largest micro-batch that fits; a resumed run keeps the one that it found."""
    world_size = rank_info.world_size
    sizes = find_sizes(settings, world_size)
    folder = CheckpointFolder(settings.saved_models)
    newest_first = [folder.folder / tag for tag in reversed(folder.tags())]
    micro = collectives.all_ranks_from_main(lambda: read_found(newest_first, sizes, world_size))
    if micro is not None:
        chosen = with_micro_batch(settings, micro, world_size)
        console.say(f"{FLAG}: {describe(chosen.deepspeed.batch)}, as in the last checkpoint")
        return chosen
    began = time.monotonic()
    limit = all_ranks_memory_limit(rank_info, device)
    console.say(f"{FLAG}: trying up to {counted(sizes[-1], 'row')} per micro-step and rank")
    with closing(Trials(settings, rank_info, limit, note)) as trials:
        micro = largest_that_fits(sizes, trials.all_ranks_fits)
    if micro is None:
        raise UserError(
            f"{FLAG}: not even {counted(sizes[0], 'row')} of {settings.data_flags.max_seq_length} tokens per "
            f"micro-step fits into memory ({limit / GIB:.1f} GiB per rank). Use --gradient_checkpointing, a higher "
            f"zero_optimization.stage, a smaller model, or fewer ranks per machine"
        )
    chosen = with_micro_batch(settings, micro, world_size)
    console.say(
        f"{FLAG}: {describe(chosen.deepspeed.batch)}; takes {trials.peaks[micro] / GIB:.2f} of "
        f"{limit / GIB:.2f} GiB per rank (tried {', '.join(map(str, trials.tried))} in "
        f"{time.monotonic() - began:.0f} s)"
    )
    return chosen


def describe(batch: BatchSizes) -> str:
    return (
        f"{counted(batch.micro, 'row')} per micro-step and rank, {counted(batch.accumulation, 'micro-step')} for the "
        f"{counted(batch.total, 'row')} of a step"
    )


def largest_that_fits(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of the ascending `sizes` for which `fits`, or None: doubled until one does not, then bisected."""
    low, high = -1, len(sizes)
    while high - low > 1:
        if low == -1:
            index = 0
        elif high == len(sizes):
            index = max(low + 1, sum(size <= 2 * sizes[low] for size in sizes) - 1)
        else:
            index = (low + high) // 2
        if fits(sizes[index]):
            low = index
        else:
            high = index
    return None if low == -1 else sizes[low]


def all_ranks_memory_limit(rank_info: RankInfo, device: torch.device) -> int:
    """Bytes that a rank may take, the least of all ranks. Ranks on one machine without GPUs share its memory."""
    is_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if is_gpu else available_bytes() // rank_info.local_size
    return int((1 - MARGIN) * min(collectives.all_ranks_gather(free)))


class Trials:
    """Tries sizes in a child process, which is replaced when one did not fit. `peaks`: bytes by size that fits."""

    def __init__(self, settings: Settings, rank_info: RankInfo, limit: int, note: Callable[[str, int], None]) -> None:
        self.settings, self.rank_info, self.limit, self.note = settings, rank_info, limit, note
        self.peaks: dict[int, int] = {}
        self.tried: list[int] = []
        self._child: tuple[BaseProcess, Connection] | None = None

    def all_ranks_fits(self, micro: int) -> bool:
        self.note(f"trying {counted(micro, 'row')} per micro-step", 0)
        self.tried.append(micro)
        child, pipe = self._child or self._all_ranks_start(micro)
        with suppress(OSError):  # a child that has ended already: its exit code gives the reason
            pipe.send(micro)
        outcome, peak = Outcome.RUNNING, 0
        while True:
            if outcome is Outcome.RUNNING:
                outcome, peak = await_outcome(child, pipe)
            else:
                time.sleep(EXCHANGE_SECONDS)
            gathered = collectives.all_ranks_gather((outcome, peak))
            outcomes = [each for each, _ in gathered]
            if all(each == Outcome.FITS for each in outcomes):
                self.peaks[micro] = max(each for _, each in gathered)
                return True
            if Outcome.TOO_LARGE in outcomes:
                self.close()
                return False
            if Outcome.FAILED in outcomes or all(each == Outcome.LOST for each in outcomes):
                raise UserError(
                    f"{FLAG}: the process of rank {outcomes.index(max(outcomes))} that tried "
                    f"{counted(micro, 'row')} per micro-step failed, for the reason above. Without the flag the run "
                    f"would probably fail in the same way"
                )

    def _all_ranks_start(self, micro: int) -> tuple[BaseProcess, Connection]:
        port = collectives.all_ranks_from_main(free_port)
        request = TrialRequest(
            with_micro_batch(self.settings, micro, self.rank_info.world_size), self.rank_info, port, self.limit
        )
        spawn = multiprocessing.get_context("spawn")
        pipe, inner = spawn.Pipe()
        child = spawn.Process(target=run_trials, args=(request, inner), name="micro-batch", daemon=True)
        child.start()
        inner.close()  # so that the child's end is noticed
        self._child = child, pipe
        return self._child

    def close(self) -> None:
        if self._child is not None:
            child, pipe = self._child
            child.kill()
            child.join()
            pipe.close()
            self._child = None


def await_outcome(child: BaseProcess, pipe: Connection) -> tuple[Outcome, int]:
    """The outcome of a child after at most EXCHANGE_SECONDS, and the bytes that it took."""
    try:
        return (Outcome.FITS, pipe.recv()) if pipe.poll(EXCHANGE_SECONDS) else (Outcome.RUNNING, 0)
    except (EOFError, OSError):
        child.join()
    if child.exitcode in (NO_MEMORY, -signal.SIGKILL):  # the system kills what takes too much memory
        return Outcome.TOO_LARGE, 0
    return (Outcome.LOST if child.exitcode == LOST_RANK else Outcome.FAILED), 0
