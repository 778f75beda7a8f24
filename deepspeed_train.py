"""Pretrain a BERT: parse, validate, build, loop. `--help` lists the flags; docs/configuration.md explains them."""

from common.starting import start

if __name__ == "__main__":
    start.begin()  # before the imports below, which take seconds: a request to stop must not wait for them

import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from common.console import console
from common.errors import run_command
from common.outcome import leave_outcome, sign_of_life
from common.processes import STOPPED_EXIT_CODE
from training.build import build_run, keep_time
from training.dry_run import dry_run
from training.engine.compile_locks import guard_compiles
from training.inputs.datasets import open_data
from training.loop import train
from training.plan.time_budget import process_start
from training.runtime import collectives
from training.runtime.lock import lock_folder
from training.runtime.logs import begin_logs, send_logs
from training.runtime.ranks import find_place, pick_device, share_cores
from training.runtime.restarting import restart_alone
from training.runtime.stopping import StopRequests
from training.runtime.watchdog import Watchdog
from training.settings.arguments import read_arguments
from training.settings.precision import avoid_broken_amx
from training.settings.resolve import resolve_settings


def main(argv: Sequence[str] | None = None, began: float | None = None) -> int:
    """`began`: when the process did, by time.monotonic(), from where --time_budget counts; None: now."""
    began = time.monotonic() if began is None else began
    with ExitStack() as stack:
        stack.callback(start.end)
        start.begin()
        flags, problems = read_arguments(argv)
        if not problems.messages and flags.max_restarts is not None:
            code = restart_alone(flags.max_restarts)
            leave_outcome(code, True)  # the child told us, and a supervisor above us waits for it too
            return code
        place = find_place()
        stack.enter_context(sign_of_life(place.rank))
        console.enabled = place.is_main
        avoid_broken_amx()
        share_cores(place)
        guard_compiles()
        settings = resolve_settings(flags, place, problems)
        datasets = open_data(settings.data, place)
        device = pick_device(place)
        if place.is_main and not flags.dry_run:
            stack.enter_context(lock_folder(settings.saved_models))
        send_logs(None if flags.dry_run else settings.runs / "logs", place.rank)
        stack.enter_context(collectives.told_of_lost_ranks())
        stuck_seconds = 60 * flags.stuck_after_minutes
        collectives.start(device, place, stuck_seconds)
        stop = StopRequests()
        beats = None if flags.dry_run else settings.runs / "ranks"
        watchdog = stack.enter_context(Watchdog(beats, place, stop, stuck_seconds, start.launcher))
        run = build_run(settings, datasets, place, device, stop, began, watchdog.note)
        stack.callback(run.checkpoints.join)  # before the folder is let go
        begin_logs()
        watchdog.on_write = partial(keep_time, run)
        if flags.dry_run:
            dry_run(run)
        collectives.barrier()  # until here a request to stop ends the process; from here on all ranks save first
        stack.enter_context(stop)
        is_finished = flags.dry_run or train(run, watchdog)
        collectives.leave()
    code = 0 if is_finished else STOPPED_EXIT_CODE
    leave_outcome(code, place.is_main)
    return code


if __name__ == "__main__":
    run_command(partial(main, began=process_start()))
