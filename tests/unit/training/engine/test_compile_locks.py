"""The lock around a compile: taken in turn, waited for, and taken over from a process that was killed."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from training.engine import compile_locks
from training.engine.compile_locks import GUARD, Announcement, CompileLock


@pytest.fixture(autouse=True)
def announcements(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Locks that a test leaves behind must not print that they are compiling into the output of other tests."""
    begun: list[Announcement] = []
    begin = Announcement.__init__

    def begin_and_keep(self: Announcement, folder: Path) -> None:
        begun.append(self)
        begin(self, folder)

    monkeypatch.setattr(Announcement, "__init__", begin_and_keep)
    yield
    for announcement in begun:
        announcement.ended.set()


def die_holding(path: Path, kind: type[compile_locks.FileBaton] = CompileLock) -> None:
    """A process that takes the lock and is killed."""
    child = os.fork()
    if not child:
        kind(str(path)).try_acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert path.exists()


def ask(path: Path) -> tuple[threading.Thread, list[bool]]:
    """Another process that wants to compile; the answer, whether it may, arrives when it has waited."""
    answers: list[bool] = []

    def acquire_or_wait() -> None:
        lock = CompileLock(str(path), 0.01)
        answer = lock.try_acquire()
        if not answer:
            lock.wait()
        answers.append(answer)

    asking = threading.Thread(target=acquire_or_wait, daemon=True)
    asking.start()
    asking.join(0.3)
    return asking, answers


def await_text(read: Callable[[], str], text: str) -> str:
    """What is printed until `text` is."""
    printed, deadline = "", time.monotonic() + 60
    while text not in printed:
        assert time.monotonic() < deadline, printed
        time.sleep(0.02)
        printed += read()
    return printed


def test_a_lock_that_a_killed_process_left_is_taken_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lock"
    die_holding(path)
    lock = CompileLock(str(path))
    assert lock.try_acquire()
    assert "lock: was left by a run that died while compiling" in capsys.readouterr().err
    asking, answers = ask(path)
    assert not answers, "only one may compile"
    lock.release()
    asking.join(60)
    assert answers == [True], "the next one compiles in turn, and ninja finds nothing to do"
    assert capsys.readouterr().err == ""


def test_nothing_but_the_guard_is_left(tmp_path: Path) -> None:
    for _ in range(2):
        lock = CompileLock(str(tmp_path / "lock"))
        assert lock.try_acquire()
        lock.release()
    assert [path.name for path in tmp_path.iterdir()] == [GUARD]
    assert (tmp_path / GUARD).read_text() == ""


def test_who_waits_when_the_holder_dies_compiles(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = CompileLock(str(path))
    assert holder.try_acquire()
    asking, answers = ask(path)
    assert not answers
    assert holder.guard is not None
    holder.guard.close()  # as the system does for a process that dies
    asking.join(60)
    assert answers == [True]
    assert path.exists(), "other programs must wait for it"


def test_a_lock_of_another_program_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's own: nothing shows whether its process is alive."""
    monkeypatch.setattr(compile_locks, "PATIENCE_SECONDS", 0.1)
    path = tmp_path / "lock"
    die_holding(path, compile_locks.FileBaton)
    asking, answers = ask(path)
    assert not answers
    assert path.exists()
    await_text(lambda: capsys.readouterr().err, f"{path}: waiting for another program")
    path.unlink()
    asking.join(60)
    assert answers == [False]


def test_another_program_waits_for_ours(tmp_path: Path) -> None:
    lock = CompileLock(str(tmp_path / "lock"))
    assert lock.try_acquire()
    assert not compile_locks.FileBaton(str(tmp_path / "lock")).try_acquire()
    lock.release()
    assert compile_locks.FileBaton(str(tmp_path / "lock")).try_acquire()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only torch's own lock is left: nothing shows who has it, so it is never taken over."""

    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(compile_locks.fcntl, "flock", refuse)
    lock = CompileLock(str(tmp_path / "lock"))
    assert lock.try_acquire()
    assert not CompileLock(str(tmp_path / "lock")).try_acquire()
    lock.release()
    assert not (tmp_path / "lock").exists()


def test_many_at_once_compile_one_after_another(tmp_path: Path) -> None:
    """Processes that die while compiling and processes that finish: never two at a time."""
    path, trace = tmp_path / "lock", tmp_path / "trace"
    children = []
    for number in range(8):
        child = os.fork()
        if not child:
            _compile_and_perhaps_die(path, trace, dies=number % 2 == 0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    lines = trace.read_text().split()
    assert len(lines) == 16
    for first, second in zip(lines[::2], lines[1::2], strict=True):
        assert first.startswith("begin")
        assert second == first.replace("begin", "end")


def _compile_and_perhaps_die(path: Path, trace: Path, dies: bool) -> None:
    try:
        lock = CompileLock(str(path), 0.001)
        if lock.try_acquire():
            descriptor = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(descriptor, f"begin{os.getpid()}\n".encode())
            time.sleep(0.02)
            os.write(descriptor, f"end{os.getpid()}\n".encode())
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            lock.release()
    finally:
        os._exit(0)


def test_compiling_is_announced_and_shown_to_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_locks, "SECONDS_PER_LINE", 0.05)
    folder = tmp_path / "cpu_adam"
    folder.mkdir()
    lock = CompileLock(str(folder / "lock"))
    assert lock.try_acquire()
    said = await_text(lambda: capsys.readouterr().out, "still compiling cpu_adam, for ")
    assert said.startswith("compiling DeepSpeed's extension cpu_adam: once on this machine, 1 to 4 minutes\n")
    (folder / "cpu_adam.so").write_bytes(b"")
    lock.release()
    assert re.search(r"^compiled cpu_adam \(after \d+ seconds\)$", capsys.readouterr().out, re.MULTILINE)
    time.sleep(0.2)
    again = CompileLock(str(folder / "lock"))
    assert again.try_acquire()
    again.release()
    assert capsys.readouterr().out == "", "there is nothing to compile"
    (folder / "cpu_adam.so").unlink()
    failing = CompileLock(str(folder / "lock"))
    assert failing.try_acquire()
    failing.release()
    assert re.search(r"could not compile cpu_adam \(after \d+ seconds\)", capsys.readouterr().out)
