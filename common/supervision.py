"""Starting a training command again when it dies: what its exit code means, and signals passed on to its ranks."""

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import types
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from common.console import console
from common.errors import UserError
from common.launchers import is_launcher
from common.outcome import OUTCOME_VARIABLE, find_lost_rank, read_outcome
from common.processes import STOP_SIGNALS, STOPPED_EXIT_CODE, USER_ERROR_EXIT_CODE

SCRIPT = "deepspeed_train.py"
FINAL_CODES = (0, USER_ERROR_EXIT_CODE, STOPPED_EXIT_CODE)
DIED_UNSEEN = 1  # the `deepspeed` command ends with 0 when the launcher below it was killed
GRACE_SECONDS = 30.0  # for ranks that outlived their launcher to save


class Supervisor:
    """Runs commands one after another. Use as a context manager: while entered, stop signals go to the ranks."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.is_asked = threading.Event()
        self.has_ranks = False  # whether a request reached one
        self.lost_rank: int | None = None  # the one that the last command died of, where that is known
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Supervisor":
        for number in STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, command: list[str]) -> int:
        """The command's exit code, 128 + n for signal n; never 0 for a training that did not come to its end."""
        if self.is_asked.is_set():
            return STOPPED_EXIT_CODE
        with outcome_folder(command) as folder:
            outcome = folder / "outcome"
            try:
                self.process = subprocess.Popen(
                    command, start_new_session=True, env={**os.environ, OUTCOME_VARIABLE: str(outcome)}
                )
            except OSError as error:
                raise UserError(
                    f"{command[0]}: cannot be started ({error.strerror}); expected a command that is on the PATH; is "
                    f"the environment active?"
                ) from None
            if self.is_asked.is_set():  # between the first line and here
                self.process.terminate()
            code = self.process.wait()
            is_finished = code == 0 and read_outcome(outcome) == 0
            # Of a run that came to its end no rank is left: what a script started beside it, as TensorBoard, may stay.
            has_orphans = not is_finished and end_orphans(self.process.pid)
            self.lost_rank = find_lost_rank(outcome)
            if code == 0 and not is_finished and (has_orphans or leaves_outcome(command)):
                code = DIED_UNSEEN
        if self.is_asked.is_set() and not self.has_ranks:
            return STOPPED_EXIT_CODE  # there was nothing to save yet
        return code if code >= 0 else 128 - code

    def run_again(self, start: Callable[[], int], max_restarts: int, pause: float) -> int:
        """Call `start`, which runs a command here, until it ends for good or has died once too often; its last code."""
        for restarts in range(max_restarts + 1):
            code = start()
            if code in FINAL_CODES or self.is_asked.is_set():
                return code
            if restarts < max_restarts:
                console.say(f"the run died with code {code}: restart {restarts + 1} of {max_restarts}")
                if self.is_asked.wait(pause):
                    return STOPPED_EXIT_CODE
        console.warn(f"the run died with code {code} after {max_restarts} restarts: giving up")
        return code

    def _pass_on(self, number: int, _frame: types.FrameType | None) -> None:
        self.is_asked.set()
        if self.process is None or self.process.returncode is not None:
            return
        ranks = find_ranks(self.process.pid)
        self.has_ranks = self.has_ranks or bool(ranks)
        for rank in ranks:
            with suppress(psutil.Error):
                rank.send_signal(number)
        if not ranks:
            self.process.terminate()


def leaves_outcome(command: list[str]) -> bool:
    """Whether it is a training whose rank 0 can tell us how it ended."""
    # Then rank 0 may be another machine's, with a supervisor of its own.
    is_a_part = any(word.startswith(("--node_rank", "--node-rank", "--no_ssh", "--rdzv")) for word in command)
    is_seen = not may_be_elsewhere(command) or _output_dir(command) is not None
    return any(word.endswith(SCRIPT) for word in command) and is_seen and not is_a_part


@contextmanager
def outcome_folder(command: list[str]) -> Generator[Path]:
    """Where ranks leave how they ended: on this machine or, where they may be elsewhere, below their --output_dir."""
    output = _output_dir(command)
    if output is None or not leaves_outcome(command) or not may_be_elsewhere(command):
        with tempfile.TemporaryDirectory() as own:
            yield Path(own)
        return
    made = [place for place in (output, *output.parents) if not place.exists()]
    try:
        output.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=output, prefix=".outcome_"))
    except OSError as error:
        raise UserError(
            f"--output_dir {output}: cannot be written to from here ({error.strerror}); the ranks of several machines "
            f"leave there how they ended, so start this on one that shares it, or mend its permissions"
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # as far as nothing else came into them
            for place in made:
                place.rmdir()


def may_be_elsewhere(command: list[str]) -> bool:
    """Whether ranks may run on other machines."""
    is_remote = any(word.startswith(("--hostfile", "-H", "--launcher")) for word in command)
    return is_remote or Path(command[0]).name in ("srun", "mpirun", "mpiexec")


def _output_dir(command: list[str]) -> Path | None:
    for index, word in enumerate(command):
        flag, _, value = word.partition("=")
        if flag == "--output_dir" and (value or index + 1 < len(command)):
            return Path(value or command[index + 1]).absolute()
    return None


def find_ranks(launcher: int) -> list[psutil.Process]:
    """The training processes below the launcher; the launchers between do not pass signals on in time.

    A process that has a rank below it is none, though the same script stands among its words (that of --max_restarts,
    `timeout`): most pass a signal on, and a rank takes the second Ctrl-C as a demand to leave at once.
    """
    try:
        family = [psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    return [process for process in family if is_rank(process) and not has_rank_below(process)]


def is_rank(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return not is_launcher(words) and any(word.endswith(SCRIPT) for word in words)


def has_rank_below(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        words = process.cmdline()
        below = [child for child in process.children(recursive=True) if is_rank(child)]
        return any(child.cmdline() != words for child in below)  # equal words are a fork's
    return False


def end_orphans(session: int) -> bool:
    """Whether ranks outlived their launcher. They have noticed and are saving; half a minute later they are killed."""
    family = [process for process in psutil.process_iter() if _session_of(process) == session]
    _, alive = psutil.wait_procs(family, timeout=GRACE_SECONDS)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    return bool(family)


def _session_of(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:
        return None
