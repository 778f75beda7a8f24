"""A thread that reports which rank is stuck, and notices that the launcher has died.

Each rank writes a small file, `runs/<job_name>/ranks/rank_N.json`, with its progress and the line it is executing. A
rank that makes no progress for the set time reads the files of all ranks, reports the one that is behind and ends the
process; the launcher then ends the others. Of ranks with equal progress, those inside a collective wait for the rest.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from common.console import write_error
from common.files import temporary_folders, write_plainly
from common.processes import STUCK_EXIT_CODE
from training.runtime.launchers import Launcher
from training.runtime.ranks import RankInfo
from training.runtime.starting import start
from training.runtime.stopping import StopRequests

MAX_TICK_SECONDS = 1.0  # between two checks of the launcher and of the progress
MAX_WRITE_SECONDS = 10.0  # between two writes of a rank's file
REPORT_SECONDS = 5.0  # that the others give the rank that reports: the first to exit ends all
# Folders of the code in which a rank waits for others.
COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")
STOPPED = "a stop before the first step"  # the section of a rank that was asked to stop then, and has left


@dataclass(frozen=True)
class Beat:
    """The progress of a rank. Every write differs from the one before in `time`."""

    rank: int
    count: int  # timer sections begun so far
    section: str  # the current timer section
    step: int
    host: str
    pid: int
    time: float  # of the write, by the writer's clock: clocks of different machines must not be compared
    line: str  # that the main thread executes
    is_waiting: bool  # for other ranks, inside a collective


class Watchdog:
    """Use as a context manager while ranks can wait for each other; call `note()` at every timer section."""

    def __init__(
        self,
        folder: Path | None,
        rank_info: RankInfo,
        stop: StopRequests,
        stuck_seconds: float,
        launcher: Launcher | None = None,
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        """`folder` None: only the launcher is watched, and nothing is written."""
        self.folder, self.rank, self.world_size, self.stop = folder, rank_info.rank, rank_info.world_size, stop
        self.stuck_seconds, self.leave = stuck_seconds, leave
        self.launcher = launcher or Launcher()
        self._on_write: Callable[[], None] | None = None  # called at every write, from a thread
        self.count, self.section, self.step = 0, "start", 0
        self._main = threading.get_ident()
        self._earlier: list[Beat] | None = None  # read when this rank began to look stuck
        self._idle_then = 0.0  # seconds without progress when they were read
        self._folders = ExitStack()
        self._writing, self._is_stopped = threading.Lock(), False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self.folder is not None:
            self._folders.enter_context(temporary_folders(self.folder))
            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
        self._write()
        self._thread.start()
        start.call_before_leaving(self.note_stop)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """A rank that loses the connection to one that was asked to stop before the first step stops as well."""
        start.call_before_leaving(None)
        self._ended.set()
        self._thread.join()
        if isinstance(error, RuntimeError) and any(beat.section == STOPPED for beat in self._read_all()):
            start.leave("another rank was asked to stop")
        if self.folder is not None:
            with suppress(OSError):
                self._file(self.rank).unlink(missing_ok=True)
        self._folders.close()

    def call_with_each_write(self, action: Callable[[], None]) -> None:
        """Call `action` from the watchdog's thread whenever it writes its file: at least every 10 seconds."""
        self._on_write = action

    def note(self, section: str, step: int = 0) -> None:
        self.section, self.step = section, step
        self.count += 1

    def note_stop(self) -> None:
        """For the other ranks, before this one ends."""
        self._is_stopped = True
        self._write()

    def _watch(self) -> None:
        tick_seconds, write_seconds = intervals(self.stuck_seconds)
        count, idle_seconds = self.count, 0.0
        ticked = time.monotonic()
        next_write = 0.0
        while not self._ended.wait(tick_seconds):
            now = time.monotonic()
            # A tick that comes late counts little: a process that was suspended has not been stuck.
            idle_seconds = idle_seconds + min(now - ticked, 2 * tick_seconds) if count == self.count else 0.0
            count, ticked = self.count, now
            if self.launcher.is_gone():
                self.stop.request("the launcher has ended")
            if now >= next_write:
                self._write()
                if self._on_write is not None:
                    self._on_write()
                next_write = now + write_seconds
            if self.folder is not None:
                self._check_progress(idle_seconds)

    def _check_progress(self, idle_seconds: float) -> None:
        """Read the other ranks' files early and again at the end: those that did not change have no live process."""
        if idle_seconds < self.stuck_seconds / 3:
            self._earlier = None
        elif self._earlier is None:
            self._earlier, self._idle_then = self._read_all(), idle_seconds
        elif idle_seconds > max(self.stuck_seconds, self._idle_then + self.stuck_seconds / 2):
            if not self._report():
                time.sleep(REPORT_SECONDS)
            self.leave(STUCK_EXIT_CODE)

    def _write(self) -> None:
        if self.folder is None:
            return
        with self._writing:
            section = STOPPED if self._is_stopped else self.section
            process = (socket.gethostname(), os.getpid(), time.time())
            beat = Beat(self.rank, self.count, section, self.step, *process, *find_line(self._main))
            write_plainly(self._file(self.rank), json.dumps(asdict(beat)) + "\n")

    def _file(self, rank: int) -> Path:
        assert self.folder is not None
        return self.folder / f"rank_{rank}.json"

    def _read_all(self) -> list[Beat]:
        beats = []
        for rank in range(0 if self.folder is None else self.world_size):
            with suppress(OSError, ValueError, TypeError):
                beats.append(Beat(**json.loads(self._file(rank).read_text())))
        return beats

    def _report(self) -> bool:
        """Report the stuck ranks, if no lower rank does; whether this rank did."""
        beats = self._read_all()
        behind = find_stuck(beats, self._earlier or [], self.world_size)
        reporter = min({beat.rank for beat in beats} - {beat.rank for beat in behind}, default=self.rank)
        if self.rank == reporter:
            write_error(f"error: {describe(beats, behind, self.world_size, self.stuck_seconds)}")
        return self.rank == reporter


def intervals(stuck_seconds: float) -> tuple[float, float]:
    """Seconds between two checks and between two writes: several writes fit between the two reads of a check."""
    write_seconds = min(MAX_WRITE_SECONDS, stuck_seconds / 6)
    return min(MAX_TICK_SECONDS, write_seconds / 4), write_seconds


def find_line(thread: int) -> tuple[str, bool]:
    """The line that a thread executes, and whether it waits for other ranks: then the line that called a collective."""
    frame, is_waiting = sys._current_frames().get(thread), False
    while frame is not None and any(folder in frame.f_code.co_filename for folder in COLLECTIVES):
        frame, is_waiting = frame.f_back, True
    if frame is None:
        return "an unknown line", is_waiting
    file = "/".join(Path(frame.f_code.co_filename).parts[-3:])
    return f"{frame.f_code.co_qualname} ({file}:{frame.f_lineno})", is_waiting


def find_stuck(beats: Sequence[Beat], earlier: Sequence[Beat], world_size: int) -> list[Beat]:
    """The ranks that the others wait for: those that no longer write, else those with the least progress.

    `earlier` are the beats of some write intervals ago. Of the ranks with the least progress, those inside a
    collective count only if all are.
    """
    silent = [beat for beat in beats if beat in earlier]
    if silent and len(silent) < world_size:
        return silent
    least = min((beat.count for beat in beats), default=0)
    behind = [beat for beat in beats if beat.count == least]
    behind = [beat for beat in behind if not beat.is_waiting] or behind
    return behind if len(behind) < len(beats) else []


def describe(beats: Sequence[Beat], behind: Sequence[Beat], world_size: int, stuck_seconds: float) -> str:
    waited = f"no progress for {stuck_seconds:.0f} s"
    missing = sorted(set(range(world_size)) - {beat.rank for beat in beats})
    if missing:
        return f"{waited}: rank {', '.join(map(str, missing))} has written nothing. Check its log and its machine"
    if not behind:
        where = "; ".join(f"rank {beat.rank} in {beat.section}, {beat.line}" for beat in beats)
        return (
            f"{waited}: all ranks are at the same point ({where}; step {beats[0].step}). The network or a device hangs"
        )
    named = "; ".join(
        f"rank {beat.rank} (host {beat.host}, process {beat.pid}) is stuck in {beat.section} at step {beat.step}, "
        f"{beat.line}"
        for beat in behind
    )
    return f"{waited}: {named}, and the others wait for it. The last checkpoint is valid: run the same command again"
