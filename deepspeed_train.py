"""Pretrain a BERT: parse, validate, build, loop. `--help` lists the flags; docs/configuration.md explains them."""

from common.hardware import choose_accelerator
from nvidia.cpu.startup import configure_onednn
from training.runtime.starting import start

if __name__ == "__main__":
    start.begin()  # before the imports below, which take seconds: a stop request must not wait for them
    choose_accelerator()

import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from common.console import console
from common.errors import run_command
from common.memory import keep_freed_memory
from common.processes import STOPPED_EXIT_CODE
from nvidia.cpu.amx import avoid_broken_amx
from training.banner import show_banner
from training.build import all_ranks_build_run
from training.dry_run import all_ranks_dry_run
from training.engine.compile_locks import guard_compiles
from training.loop import all_ranks_train
from training.metrics.sinks import without_writer_tracebacks
from training.micro_batch import all_ranks_find_micro_batch
from training.plan.time_budget import process_start
from training.preflight import prepare_run
from training.runtime import collectives
from training.runtime.lock import all_ranks_check_shared, lock_folder
from training.runtime.logs import begin_logs, send_logs
from training.runtime.machine_check import describe_installation
from training.runtime.meeting import open_store, sharing_failures
from training.runtime.pulse import MAX_SILENT_SECONDS, Pulse
from training.runtime.ranks import RankInfo, pick_device, read_rank_info, share_cores
from training.runtime.stopping import StopRequests, all_ranks_warn_if_unwatched
from training.runtime.watchdog import Watchdog
from training.settings.flags import read_arguments


def main(argv: Sequence[str] | None = None, began: float | None = None) -> int:
    """Returns the exit code. `began`: when the process started, by time.monotonic(), for --time_budget; None: now."""
    began = time.monotonic() if began is None else began
    with ExitStack() as stack:
        stack.callback(start.end)
        start.begin()
        flags, problems = read_arguments(argv)
        rank_info = read_rank_info()
        set_up_process(rank_info, stack)
        with sharing_failures(rank_info):
            settings, datasets = prepare_run(flags, rank_info, problems)
            is_dry_run = settings.flags.training.dry_run
            device = pick_device(rank_info)
            if rank_info.is_main and not is_dry_run:
                stack.enter_context(lock_folder(settings.saved_models))
        send_logs(to_file=not is_dry_run)
        stack.enter_context(collectives.reporting_lost_ranks())
        stuck_seconds = 60 * settings.flags.faults.stuck_after_minutes
        facts = describe_installation(rank_info, datasets.digest)
        hosts = collectives.start(device, rank_info, stuck_seconds, facts)
        if not is_dry_run:
            all_ranks_check_shared(settings.saved_models, hosts)
        all_ranks_warn_if_unwatched()
        connect = partial(open_store, rank_info)
        # Before the watchdog, which sees only that all ranks wait.
        stack.enter_context(Pulse(connect, rank_info, hosts, min(MAX_SILENT_SECONDS, stuck_seconds / 2)))
        stop = StopRequests(None if datasets.cache is None else datasets.cache.interrupt)
        beats = None if is_dry_run else settings.runs / "ranks"
        watchdog = stack.enter_context(Watchdog(beats, rank_info, stop, stuck_seconds, start.launcher))
        if settings.flags.training.find_micro_batch:
            settings = all_ranks_find_micro_batch(settings, rank_info, device, watchdog.note)
        run = all_ranks_build_run(settings, datasets, rank_info, device, stop, began, watchdog.note)
        stack.callback(run.sinks.close)
        if run.uploader is not None and rank_info.is_main:
            stack.callback(run.uploader.close)
        stack.callback(run.checkpoints.join)  # before the folder is unlocked
        begin_logs(settings.runs / "logs", rank_info.rank)
        show_banner(run)
        if rank_info.is_main and not is_dry_run:
            watchdog.call_with_each_write(partial(run.clock.write_time_spent, run.checkpoints.folder))
        if is_dry_run:
            all_ranks_dry_run(run)
        collectives.all_ranks_barrier()  # until here a stop request ends the process; from here on the run saves first
        stack.enter_context(stop.receiving())
        is_finished = is_dry_run or all_ranks_train(run)
        if run.uploader is not None:
            run.uploader.all_ranks_finish(stop, run.timer.begin)
        collectives.leave()
    return 0 if is_finished else STOPPED_EXIT_CODE


def set_up_process(rank_info: RankInfo, stack: ExitStack) -> None:
    """Change what is global in this process, before anything is built. Library logs follow in send_logs()."""
    console.enable(rank_info.is_main)
    avoid_broken_amx()  # CPU features that torch may use
    configure_onednn()  # cache limits, which oneDNN reads once
    keep_freed_memory()  # of the C library's allocator
    share_cores(rank_info)  # threads, and their environment variables
    guard_compiles()  # torch's lock of compiled extensions
    stack.enter_context(without_writer_tracebacks())  # threading.excepthook


if __name__ == "__main__":
    run_command(partial(main, began=process_start()))
