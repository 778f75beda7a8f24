"""A thread that tells when a rank is stuck and which, and notices that the launcher has died.

Each rank leaves a small file, `runs/<job_name>/ranks/rank_N.json`, that says how far it has come and which line it is
at. A rank that makes no progress for the set time reads the files of all, names the one that is behind and ends the
process; the launcher then ends the others. Of ranks that are equally far, those inside a collective wait for the rest.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from common.console import write_error
from common.files import write_plainly
from common.launchers import Launcher
from common.processes import STUCK_EXIT_CODE
from training.runtime.ranks import RankInfo
from training.runtime.stopping import StopRequests

LAUNCHER_SECONDS = 1.0  # between two looks at the launcher
HEARING_SECONDS = 5.0  # that the others give the one who tells: the first to leave takes all down
# Folders of the code that makes a rank wait for others.
COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")


@dataclass(frozen=True)
class Beat:
    """How far a rank has come: the number of phases it has begun, the one it is in, and when this was written."""

    rank: int
    count: int
    phase: str
    step: int
    host: str
    pid: int
    time: float
    line: str  # that the main thread is at
    is_waiting: bool  # for other ranks, inside a collective


class Watchdog:
    """Use as a context manager from where ranks can wait for each other; `note()` at every phase."""

    def __init__(
        self,
        folder: Path | None,
        rank_info: RankInfo,
        stop: StopRequests,
        stuck_seconds: float,
        launcher: Launcher | None = None,
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        """`folder` None: nothing is written or watched but the launcher."""
        self.folder, self.rank, self.world_size, self.stop = folder, rank_info.rank, rank_info.world_size, stop
        self.stuck_seconds, self.leave = stuck_seconds, leave
        self.launcher = launcher or Launcher()
        self._on_write: Callable[[], None] | None = None
        self.made: list[Path] = []  # folders
        self.count, self.phase, self.step = 0, "start", 0
        self.since = time.monotonic()
        self._main = threading.get_ident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self.folder is not None:
            self.made = [place for place in (self.folder, *self.folder.parents) if not place.exists()]
            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self.folder is not None:
            with suppress(OSError):
                self._file(self.rank).unlink(missing_ok=True)
                for place in self.made or [self.folder]:  # a run that could not begin leaves nothing behind
                    place.rmdir()

    def call_with_each_write(self, action: Callable[[], None]) -> None:
        """Call `action` from the watchdog's thread whenever it writes its file: at least every 10 seconds."""
        self._on_write = action

    def note(self, phase: str, step: int = 0) -> None:
        self.phase, self.step = phase, step
        self.count += 1
        self.since = time.monotonic()

    def _watch(self) -> None:
        pause = min(LAUNCHER_SECONDS, self.stuck_seconds / 4)
        next_write = 0.0
        while not self._ended.wait(pause):
            if self.launcher.is_gone():
                self.stop.request("the launcher has gone")
            if time.monotonic() >= next_write:
                self._write()
                if self._on_write is not None:
                    self._on_write()
                next_write = time.monotonic() + min(10.0, self.stuck_seconds / 4)
            if self.folder is not None and time.monotonic() - self.since > self.stuck_seconds:
                if not self._tell():
                    time.sleep(HEARING_SECONDS)
                self.leave(STUCK_EXIT_CODE)

    def _write(self) -> None:
        if self.folder is None:
            return
        place = (socket.gethostname(), os.getpid(), time.time())
        beat = Beat(self.rank, self.count, self.phase, self.step, *place, *find_line(self._main))
        write_plainly(self._file(self.rank), json.dumps(asdict(beat)) + "\n")

    def _file(self, rank: int) -> Path:
        assert self.folder is not None
        return self.folder / f"rank_{rank}.json"

    def _tell(self) -> bool:
        """Name who is stuck, if that is this rank's to do; whether it was."""
        beats = [beat for rank in range(self.world_size) if (beat := _read(self._file(rank))) is not None]
        behind = find_stuck(beats, self.world_size, time.time(), self.stuck_seconds)
        speaker = min({beat.rank for beat in beats} - {beat.rank for beat in behind}, default=self.rank)
        if self.rank == speaker:
            write_error(f"error: {describe(beats, behind, self.world_size, self.stuck_seconds)}")
        return self.rank == speaker


def _read(path: Path) -> Beat | None:
    try:
        return Beat(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def find_line(thread: int) -> tuple[str, bool]:
    """The line that a thread is at, and whether it waits for other ranks: then it is the line that made it wait."""
    frame, is_waiting = sys._current_frames().get(thread), False
    while frame is not None and any(folder in frame.f_code.co_filename for folder in COLLECTIVES):
        frame, is_waiting = frame.f_back, True
    if frame is None:
        return "an unknown line", is_waiting
    file = "/".join(Path(frame.f_code.co_filename).parts[-3:])
    return f"{frame.f_code.co_qualname} ({file}:{frame.f_lineno})", is_waiting


def find_stuck(beats: list[Beat], world_size: int, now: float, stuck_seconds: float) -> list[Beat]:
    """Those that hold up the rest: whose process writes no more, else those that have come least far.

    Of those, the ones that wait for others do not count, as long as not all do.
    """
    silent = [beat for beat in beats if now - beat.time > stuck_seconds / 2]
    if silent and len(silent) < world_size:
        return silent
    least = min((beat.count for beat in beats), default=0)
    behind = [beat for beat in beats if beat.count == least]
    behind = [beat for beat in behind if not beat.is_waiting] or behind
    return behind if len(behind) < len(beats) else []


def describe(beats: list[Beat], behind: list[Beat], world_size: int, stuck_seconds: float) -> str:
    waited = f"no progress for {stuck_seconds:.0f} s"
    missing = sorted(set(range(world_size)) - {beat.rank for beat in beats})
    if missing:
        return f"{waited}: rank {', '.join(map(str, missing))} left no sign of life; look at its log and its machine"
    if not behind:
        phases = "; ".join(f"rank {beat.rank} in {beat.phase}, {beat.line}" for beat in beats)
        return f"{waited}: all ranks are equally far ({phases}; step {beats[0].step}); the network or a device hangs"
    named = "; ".join(
        f"rank {beat.rank} (host {beat.host}, process {beat.pid}) is stuck in {beat.phase} at step {beat.step}, "
        f"{beat.line}"
        for beat in behind
    )
    return f"{waited}: {named}, and the others wait for it. The last checkpoint is good; start the command again"
