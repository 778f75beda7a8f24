"""Start a training command again when it dies, and pass signals on to its ranks.

    python scripts/supervise.py --max_restarts 3 -- deepspeed --num_gpus 8 deepspeed_train.py …

A run that ends with 0 (finished), 2 (a mistake that a restart does not mend) or 75 (stopped on request, all saved) is
not started again, and its exit code is ours. Anything else is a lost rank: the command goes on from its last
checkpoint. With --fewer_ranks it does so on one rank less each time, as long as the batch can be divided.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.errors import UserError, run_command
from common.help import HelpFormatter, Parser, seconds, whole_number
from common.processes import USER_ERROR_EXIT_CODE
from common.rank_places import RankPlaces
from common.supervision import Supervisor

EXAMPLE = """example, on eight GPUs of which one may be lost:
  python scripts/supervise.py --max_restarts 3 --fewer_ranks -- deepspeed --num_gpus 8 deepspeed_train.py --cf …

--fewer_ranks takes the number from --num_gpus, or the devices from --include or --hostfile (with --exclude). The device
whose process was killed is left out where that can be told and a device can be named; else the last one is.
"""


class Formatter(HelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Leaves the lines of the example as they are."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    with Supervisor() as supervisor:
        start = partial(supervisor.run, arguments.command)
        if arguments.fewer_ranks:
            start = partial(next, run_on_fewer_ranks(supervisor, arguments.command))
        return supervisor.run_again(start, arguments.max_restarts, arguments.pause)


def run_on_fewer_ranks(supervisor: Supervisor, command: list[str]) -> Iterator[int]:
    """The code of each start, run when it is asked for: the first as it stands, every other with one rank less."""
    yield supervisor.run(command)
    while True:
        command = RankPlaces.of(command).without(supervisor.lost_rank).command
        code = supervisor.run(command)
        while code == USER_ERROR_EXIT_CODE and len(RankPlaces.of(command).places) > 1:
            command = RankPlaces.of(command).without(None).command  # perhaps the batch could not be divided
            code = supervisor.run(command)
        yield code


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="supervise.py", description=__doc__.splitlines()[0], epilog=EXAMPLE, formatter_class=Formatter)
    parser.add_argument(
        "--max_restarts", type=whole_number, default=3, metavar="N", help="starts after the first (default: 3)"
    )
    parser.add_argument("--fewer_ranks", action="store_true", help="leave out one rank at each restart")
    parser.add_argument("--pause", type=seconds, default=5.0, metavar="S", help="seconds before a restart (default: 5)")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- command", help="what to run")
    arguments = parser.parse_args(argv)
    if arguments.command[:1] == ["--"]:
        arguments.command = arguments.command[1:]
    if not arguments.command:
        raise UserError("there is no command to run; put it behind --, as in: … --max_restarts 3 -- deepspeed …")
    if arguments.fewer_ranks:
        RankPlaces.of(arguments.command)
    return arguments


if __name__ == "__main__":
    run_command(main)
