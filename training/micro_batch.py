"""--find_micro_batch: the largest micro-batch that fits in memory, found by trying.

Every rank starts a child process that builds the same model and engine and takes real steps on full rows
(`run_trials`), so that running out of memory ends a child and not the run. The ranks exchange the outcomes: a size fits
if it fits on all of them.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from enum import IntEnum
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from common.console import console
from common.errors import UserError
from common.memory import available_bytes, peak_resident_mib, resident_bytes
from common.words import counted
from data.shards.schema import NO_LABEL
from data.stream.batches import PRETRAINING_KIND, Batch
from data.stream.loader import StepBatches
from training.build import build_model, put_in_engine, replace_blocks
from training.checkpoints.folder import CheckpointFolder
from training.engine.build import all_ranks_take_step, set_batch
from training.engine.compile_locks import guard_compiles
from training.metrics.timing import SectionTimer
from training.metrics.window import Tally
from training.plan.step_plan import Phase, Segment
from training.runtime import collectives
from training.runtime.logs import send_logs
from training.runtime.ranks import RankInfo, free_port, pick_device, share_cores
from training.settings.deepspeed_file import BatchSizes
from training.settings.resolve import Settings, find_sizes, read_found, with_micro_batch

FLAG = "--find_micro_batch"
MARGIN = 0.1  # of the free memory stays unused: batches differ, and so does what other programs take
EXCHANGE_SECONDS = 0.2
NO_MEMORY, LOST_RANK = 81, 82  # exit codes of a child
MICRO_STEPS = 2  # where steps have several: then the sum of gradients is in memory beside the activations
CHECK_SECONDS = 0.02  # between two looks at a child's memory
PR_SET_PDEATHSIG = 1  # of Linux's prctl()
MIB, GIB = 2**20, 2**30


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
            f"{FLAG}: not even {counted(sizes[0], 'row')} of {settings.flags.data.max_seq_length} tokens per "
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
        settings = with_micro_batch(self.settings, micro, self.rank_info.world_size)
        spawn = multiprocessing.get_context("spawn")
        pipe, inner = spawn.Pipe()
        request = (settings, self.rank_info, port, self.limit, inner)
        child = spawn.Process(target=run_trials, args=request, name="micro-batch", daemon=True)
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


def run_trials(settings: Settings, rank_info: RankInfo, port: int, limit: int, pipe: Connection) -> None:
    """Receive sizes and send the bytes that each takes. Ends with NO_MEMORY if a size takes more than `limit`.

    `port`: at which the children of all ranks meet. On a CPU the memory of loaded libraries does not count.
    """
    end_with_parent()
    os.environ["MASTER_PORT"] = str(port)
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # torchrun's store is that of the run
    console.enable(rank_info.is_main)
    share_cores(rank_info)
    guard_compiles()
    send_logs(to_file=False)
    device = pick_device(rank_info)
    base = limit_memory(limit, device)
    try:
        collectives.start(device, rank_info, 60 * settings.flags.faults.stuck_after_minutes)
        model = build_model(settings.model_config, settings.flags.model, settings.recomputed_layers)
        replace_blocks(model, settings, rank_info.rank)
        # As in a dry run, monitors are not built: they write or send data.
        flags = replace(settings.flags, training=settings.flags.training.model_copy(update={"dry_run": True}))
        engine = put_in_engine(model, replace(settings, flags=flags))
        timer, num_steps = SectionTimer(device), 2  # the first step allocates the state of the optimizer
        while True:
            micro = pipe.recv()
            segment, batches = full_step(settings, rank_info.world_size, micro)
            set_batch(engine, segment)
            for _ in range(num_steps):
                all_ranks_take_step(engine, batches, Tally(), timer, settings.flags.training.seed, device)
            if device.type == "cuda":
                torch.cuda.synchronize()
            num_steps = 1
            pipe.send(measure_peak(base, device))
    except EOFError:
        os._exit(0)  # the run needs no more sizes
    except (torch.OutOfMemoryError, MemoryError):
        os._exit(NO_MEMORY)
    except RuntimeError as error:
        if "can't allocate memory" in str(error):  # torch's allocator on a CPU
            os._exit(NO_MEMORY)
        if any(sign in str(error) for sign in collectives.LOST_SIGNS):
            os._exit(LOST_RANK)
        raise


def end_with_parent() -> None:
    """Leave Ctrl-C to the run, end when the run dies, and be the first that the system kills if memory runs out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")


def limit_memory(limit: int, device: torch.device) -> int:
    """Have this process fail if it takes more. The bytes of main memory that it has now."""
    base = resident_bytes()
    if device.type == "cuda":
        share = limit / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
        return base

    def watch() -> None:
        while resident_bytes() - base <= limit:
            time.sleep(CHECK_SECONDS)
        os._exit(NO_MEMORY)

    threading.Thread(target=watch, name="memory", daemon=True).start()
    return base


def measure_peak(base: int, device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return max(0, int(peak_resident_mib() * MIB) - base)


def full_step(settings: Settings, world_size: int, micro: int) -> tuple[Segment, StepBatches]:
    """A step with micro-steps of `micro` full rows; how many more of them a step of the run has takes no memory."""
    length, micro_rows = settings.lengths[-1].length, micro * world_size
    is_single = settings.flags.training.batch_schedule is None and settings.deepspeed.batch.total == micro_rows
    accumulation = 1 if is_single else MICRO_STEPS
    phase = Phase(0, length, micro, num_rows=micro, tokens_per_row=length)
    predictions = settings.flags.data.max_predictions_per_seq
    batch = full_rows(micro, length, predictions, settings.model_config.num_tokens)
    batches = StepBatches((batch,) * accumulation, next_sample=0, rows=())
    return Segment(0, phase, accumulation, micro_rows * accumulation), batches


def full_rows(num_rows: int, length: int, predictions: int, num_tokens: int) -> Batch:
    """Rows without padding and with as many masked tokens as a row may have: no batch of the run takes more memory."""
    shape = (num_rows, length)
    ids = torch.arange(num_rows * length).reshape(shape) % num_tokens
    labels = torch.full(shape, NO_LABEL)
    labels[:, 1 : 1 + predictions] = ids[:, 1 : 1 + predictions]
    return Batch(
        kind=torch.tensor(PRETRAINING_KIND),
        input_ids=ids,
        input_mask=torch.ones(shape, dtype=torch.int64),
        segment_ids=torch.zeros(shape, dtype=torch.int64),
        next_sentence_label=torch.zeros(num_rows, dtype=torch.int64),
        masked_lm_labels=labels,
    )
