"""Commands that run one after another, and receive the stop requests of the process that runs them."""

import subprocess
import types
from contextlib import suppress
from pathlib import Path

import psutil

from common.errors import UserError
from common.processes import STOPPED_EXIT_CODE
from training.runtime.launchers import find_deepspeed, is_launcher
from training.runtime.ranks import free_port

SCRIPT = "deepspeed_train.py"  # that ranks execute


def launch_command(script: Path, ranks: int | None) -> list[str]:
    """`deepspeed` with `script` for `ranks` on this machine; None: one per GPU."""
    path = find_deepspeed()
    if path is None:
        raise UserError("deepspeed: command not found. Run pip install -r requirements.txt, then activate .venv")
    count = [] if ranks is None else ["--num_gpus", str(ranks)]
    return [path, "--master_port", str(free_port()), *count, str(script)]


class Chain:
    """Runs one command after another, and forwards stop requests to the ranks of the current one."""

    def __init__(self) -> None:
        self.is_asked = False
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, command: list[str]) -> int:
        """The command's exit code, 128 + n if signal n ended it; 75 if it was asked to stop before it had ranks."""
        if self.is_asked:
            return STOPPED_EXIT_CODE
        self._process = subprocess.Popen(command, start_new_session=True)  # Ctrl-C reaches only this process
        if self.is_asked:  # meanwhile
            self._process.terminate()
        code = self._process.wait()
        if code < 0:
            return STOPPED_EXIT_CODE if self.is_asked else 128 - code
        return code

    def stop(self, number: int, _frame: types.FrameType | None) -> None:
        """Send the signal to the ranks: the launchers above them do not wait until they have saved."""
        self.is_asked = True
        if self._process is None or self._process.returncode is not None:
            return
        ranks = find_ranks(self._process.pid)
        for rank in ranks:
            with suppress(psutil.Error):
                rank.send_signal(number)
        if not ranks:
            self._process.terminate()


def find_ranks(process: int) -> list[psutil.Process]:
    """`process` and those below it that execute SCRIPT and are not launchers."""
    ranks = []
    with suppress(psutil.NoSuchProcess):
        for member in [psutil.Process(process), *psutil.Process(process).children(recursive=True)]:
            with suppress(psutil.Error):
                words = member.cmdline()
                if not is_launcher(words) and any(word.endswith(SCRIPT) for word in words):
                    ranks.append(member)
    return ranks
