"""--max_restarts under plain `python`: this process starts the same command as its child, again when it dies."""

import os
import sys
from functools import partial

from common.errors import UserError
from common.starting import start
from common.supervision import Supervisor
from training.runtime.ranks import is_started_by_srun

FLAG = "--max_restarts"
PAUSE_SECONDS = 5.0


def restart_alone(max_restarts: int) -> int:
    """The child's last exit code. A rank of several cannot do this: the others would wait for who has gone."""
    if "RANK" in os.environ or is_started_by_srun(os.environ):
        raise UserError(
            f"{FLAG} {max_restarts}: a launcher started this rank, and one rank cannot start the others again; drop "
            f"the flag, and put the whole command behind `python scripts/supervise.py {FLAG} {max_restarts} --`"
        )
    command = without_flag([sys.executable, *sys.orig_argv[1:]])
    with Supervisor() as supervisor:
        start.hand_over()
        return supervisor.run_again(partial(supervisor.run, command), max_restarts, PAUSE_SECONDS)


def without_flag(command: list[str]) -> list[str]:
    kept = [word for word in command if not word.startswith(f"{FLAG}=")]
    while FLAG in kept:
        place = kept.index(FLAG)
        del kept[place : place + 2]
    return kept
