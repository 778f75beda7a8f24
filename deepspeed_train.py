"""Pretrain a BERT: parse, validate, build, loop. `--help` lists the flags; docs/configuration.md explains them."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from common.console import console
from common.errors import run_command
from common.processes import STOPPED_EXIT_CODE
from training import distributed
from training.arguments import read_arguments
from training.budget import process_start
from training.dry_run import dry_run
from training.environment import find_place, pick_device, share_cores
from training.lock import lock_folder
from training.logs import begin_logs, send_logs
from training.loop import train
from training.precision import avoid_broken_amx
from training.run import build_run, open_data
from training.settings import resolve_settings
from training.stopping import StopRequests


def main(argv: Sequence[str] | None = None, began: float | None = None) -> int:
    """`began`: when the process did, by time.monotonic(), from where --time_budget counts; None: now."""
    began = time.monotonic() if began is None else began
    flags, problems = read_arguments(argv)
    place = find_place()
    console.enabled = place.is_main
    avoid_broken_amx()
    share_cores(place)
    settings = resolve_settings(flags, place, problems)
    datasets = open_data(settings, place)
    device = pick_device(place)
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequests())
        if place.is_main and not flags.dry_run:
            stack.enter_context(lock_folder(settings.saved_models))
        send_logs(None if flags.dry_run else settings.runs / "logs", place.rank)
        distributed.start(device)
        run = build_run(settings, datasets, place, device, stop, began)
        begin_logs()
        if flags.dry_run:
            dry_run(run)
        is_stopped = not flags.dry_run and not train(run)
        distributed.leave()
    return STOPPED_EXIT_CODE if is_stopped else 0


if __name__ == "__main__":
    run_command(partial(main, began=process_start()))
