"""Start a training command again when it dies, and pass signals on to its ranks.

    python scripts/supervise.py --max_restarts 3 -- deepspeed --num_gpus 8 deepspeed_train.py …

A run that ends with 0 (finished), 2 (a mistake that a restart does not mend) or 75 (stopped on request, all saved) is
not started again, and its exit code is ours. Anything else is a lost rank: the command goes on from its last
checkpoint. With --fewer_ranks it does so on one rank less each time, as long as the batch can be divided.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.console import console
from common.errors import UserError, run_command
from common.help import HelpFormatter
from common.launchers import is_launcher
from common.processes import STOP_SIGNALS, STOPPED_EXIT_CODE, USER_ERROR_EXIT_CODE

SCRIPT = "deepspeed_train.py"
COUNT_FLAGS = ("--num_gpus", "--num_accelerators")
FINAL_CODES = (0, USER_ERROR_EXIT_CODE, STOPPED_EXIT_CODE)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    command = list(arguments.command)
    restarts, is_reduced = 0, False
    while True:
        code, is_asked = run_once(command)
        if is_reduced and code == USER_ERROR_EXIT_CODE and not is_asked and number_of_ranks(command) > 1:
            command = with_fewer_ranks(command)  # perhaps the batch could not be divided by so many
            continue
        if code in FINAL_CODES or is_asked:
            return code
        if restarts == arguments.max_restarts:
            console.warn(f"the command died with code {code} after {restarts} restarts: giving up")
            return code
        restarts += 1
        if arguments.fewer_ranks:
            command, is_reduced = with_fewer_ranks(command), True
        console.say(f"the command died with code {code}: restart {restarts} of {arguments.max_restarts}")
        time.sleep(arguments.pause)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=HelpFormatter)
    parser.add_argument("--max_restarts", type=int, default=3, metavar="N", help="starts after the first (default: 3)")
    parser.add_argument("--fewer_ranks", action="store_true", help="leave out one rank at each restart")
    parser.add_argument("--pause", type=float, default=5.0, metavar="S", help="seconds before a restart (default: 5)")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- command", help="what to run")
    arguments = parser.parse_args(argv)
    if arguments.command[:1] == ["--"]:
        arguments.command = arguments.command[1:]
    if not arguments.command:
        raise UserError("there is no command to run; put it behind --, as in: … --max_restarts 3 -- deepspeed …")
    if arguments.fewer_ranks:
        count_place(arguments.command)
    return arguments


def count_place(command: list[str]) -> int:
    """Where in `command` the number of ranks stands."""
    for flag in COUNT_FLAGS:
        if flag in command[:-1] and command[command.index(flag) + 1].isdigit():
            return command.index(flag) + 1
    raise UserError(f"--fewer_ranks needs a command with {' or '.join(COUNT_FLAGS)} and a number")


def number_of_ranks(command: list[str]) -> int:
    return int(command[count_place(command)])


def with_fewer_ranks(command: list[str]) -> list[str]:
    place = count_place(command)
    return [*command[:place], str(max(1, number_of_ranks(command) - 1)), *command[place + 1 :]]


def run_once(command: list[str]) -> tuple[int, bool]:
    """The command's exit code (128 + n for signal n), and whether we were asked to stop while it ran."""
    try:
        process = subprocess.Popen(command, start_new_session=True)
    except OSError as error:
        raise UserError(f"{command[0]}: cannot be started ({error.strerror}); is the environment active?") from None
    asked: list[int] = []

    def pass_on(number: int, _frame: types.FrameType | None) -> None:
        asked.append(number)
        ranks = find_ranks(process.pid)
        for rank in ranks:
            with suppress(psutil.Error):
                rank.send_signal(number)
        if not ranks:
            process.terminate()

    before = {number: signal.signal(number, pass_on) for number in STOP_SIGNALS}
    try:
        code = process.wait()
        if end_orphans(process.pid) and code == 0:
            code = 1  # the `deepspeed` command ends with 0 when the launcher below it was killed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return (code if code >= 0 else 128 - code), bool(asked)


def find_ranks(launcher: int) -> list[psutil.Process]:
    """The training processes below the launcher; the launchers between do not pass signals on in time."""
    try:
        family = [psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    return [process for process in family if is_rank(process)]


def is_rank(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return not is_launcher(words) and any(word.endswith(SCRIPT) for word in words)


def end_orphans(session: int) -> bool:
    """Whether ranks outlived their launcher. They have noticed and are saving; half a minute later they are killed."""
    family = [process for process in psutil.process_iter() if _session_of(process) == session]
    _, alive = psutil.wait_procs(family, timeout=30)
    for process in alive:
        process.kill()
    return bool(family)


def _session_of(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:
        return None


if __name__ == "__main__":
    run_command(main)
