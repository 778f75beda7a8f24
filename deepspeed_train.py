"""Pretrain a BERT: parse, validate, build, loop. `--help` lists the flags; docs/configuration.md explains them."""

from collections.abc import Sequence

from common.console import console
from common.errors import run_command
from training import distributed
from training.arguments import parse_arguments
from training.dry_run import dry_run
from training.environment import find_place, pick_device, share_cores
from training.logs import send_logs
from training.loop import train
from training.precision import avoid_broken_amx
from training.run import build_run, open_data
from training.settings import resolve_settings


def main(argv: Sequence[str] | None = None) -> int:
    flags = parse_arguments(argv)
    place = find_place()
    console.enabled = place.is_main
    avoid_broken_amx()
    share_cores(place)
    settings = resolve_settings(flags, place)
    datasets = open_data(settings)
    device = pick_device(place)
    send_logs(None if flags.dry_run else settings.runs / "logs", place.rank)
    distributed.start(device)
    run = build_run(settings, datasets, place, device)
    dry_run(run) if flags.dry_run else train(run)
    distributed.leave()
    return 0


if __name__ == "__main__":
    run_command(main)
