"""One trial process of --find_micro_batch: builds the model and the engine of a run, and takes steps of given sizes."""

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from common.console import console
from common.memory import peak_resident_mib, resident_bytes
from data.shards.schema import NO_LABEL
from data.stream.batches import PRETRAINING_KIND, Batch
from data.stream.loader import StepBatches
from training.build import build_model, put_in_engine, replace_blocks
from training.engine.build import all_ranks_take_step, set_batch
from training.engine.compile_locks import guard_compiles
from training.metrics.tally import Tally
from training.metrics.timing import SectionTimer
from training.plan.step_plan import Phase, Segment
from training.runtime import collectives
from training.runtime.logs import send_logs
from training.runtime.ranks import RankInfo, pick_device, share_cores
from training.settings.resolve import Settings

NO_MEMORY, LOST_RANK = 81, 82  # exit codes
MICRO_STEPS = 2  # where steps have several: then the sum of gradients is in memory beside the activations
CHECK_SECONDS = 0.02  # between two looks at this process's memory
PR_SET_PDEATHSIG = 1  # of Linux's prctl()
MIB = 2**20


@dataclass(frozen=True)
class TrialRequest:
    """`limit`: bytes that the trial may take. On a CPU they are counted from here, when libraries are loaded."""

    settings: Settings
    rank_info: RankInfo
    port: int  # at which the trial processes of all ranks meet
    limit: int

    def step_of(self, micro: int) -> tuple[Segment, StepBatches]:
        """A step with micro-steps of `micro` rows; how many more of them a step of the run has takes no memory."""
        settings, length = self.settings, self.settings.lengths[-1].length
        micro_rows = micro * self.rank_info.world_size
        is_single = settings.batch_schedule is None and settings.deepspeed.batch.total == micro_rows
        accumulation = 1 if is_single else MICRO_STEPS
        phase = Phase(0, length, micro, num_rows=micro, tokens_per_row=length)
        predictions = settings.data_flags.max_predictions_per_seq
        batch = full_rows(micro, length, predictions, settings.model_config.num_tokens)
        batches = StepBatches((batch,) * accumulation, next_sample=0, rows=())
        return Segment(0, phase, accumulation, micro_rows * accumulation), batches


def run_trials(request: TrialRequest, pipe: Connection) -> None:
    """Receive sizes and send the bytes that each takes. Ends with NO_MEMORY if a size takes more than the limit."""
    end_with_parent()
    os.environ["MASTER_PORT"] = str(request.port)
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # torchrun's store is that of the run
    settings, rank_info = request.settings, request.rank_info
    console.enable(rank_info.is_main)
    share_cores(rank_info)
    guard_compiles()
    send_logs(None, rank_info.rank)
    device = pick_device(rank_info)
    base = limit_memory(request.limit, device)
    try:
        collectives.start(device, rank_info, 60 * settings.fault_flags.stuck_after_minutes)
        model = build_model(settings.model_config, settings.model_flags, settings.recomputed_layers)
        replace_blocks(model, settings, rank_info.rank)
        # As in a dry run, monitors are not built: they write or send data.
        flags = settings.training_flags.model_copy(update={"dry_run": True})
        engine = put_in_engine(model, replace(settings, training_flags=flags))
        num_steps = 2  # the first allocates the state of the optimizer
        while True:
            micro = pipe.recv()
            for _ in range(num_steps):
                all_ranks_try_step(engine, request.step_of(micro), settings.training_flags.seed, device)
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


def all_ranks_try_step(engine: Any, step: tuple[Segment, StepBatches], seed: int, device: torch.device) -> None:
    segment, batches = step
    set_batch(engine, segment)
    all_ranks_take_step(engine, batches, Tally(), SectionTimer(device), seed, device)
    if device.type == "cuda":
        torch.cuda.synchronize()


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
