"""The lock around a compile: held, waited for, and taken over from a process that was killed."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from training.engine import compile_locks
from training.engine.compile_locks import CompileLock


def die_holding(path: Path, kind: type[compile_locks.FileBaton] = CompileLock) -> None:
    """A process that takes the lock and is killed."""
    child = os.fork()
    if not child:
        kind(str(path)).try_acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert path.exists()


def ask(path: Path) -> tuple[threading.Thread, list[bool]]:
    """Another one that wants to compile; its answer comes when it has waited."""
    answers: list[bool] = []
    asking = threading.Thread(target=lambda: answers.append(CompileLock(str(path), 0.01).try_acquire()), daemon=True)
    asking.start()
    asking.join(0.3)
    return asking, answers


def test_a_lock_that_a_killed_process_left_is_taken_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lock"
    die_holding(path)
    lock = CompileLock(str(path))
    assert lock.try_acquire()
    assert "lock: was left by a run that died while it compiled" in capsys.readouterr().err
    asking, answers = ask(path)
    assert not answers, "only one may compile"
    lock.release()
    asking.join(5)
    assert answers == [False], "it is compiled"
    assert list(tmp_path.iterdir()) == []


def test_who_waits_when_the_holder_dies_compiles(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = CompileLock(str(path))
    assert holder.try_acquire()
    asking, answers = ask(path)
    assert not answers
    assert holder.fd is not None
    os.close(holder.fd)  # what the system does for a process that dies
    asking.join(5)
    assert answers == [True]
    assert path.exists(), "others must not take it for compiled"


def test_a_foreign_lock_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's own: whether its process lives cannot be told."""
    monkeypatch.setattr(compile_locks, "PATIENCE_SECONDS", 0.1)
    path = tmp_path / "lock"
    die_holding(path, compile_locks.FileBaton)
    asking, answers = ask(path)
    assert not answers
    assert path.exists()
    assert f"{path}: waiting for another process" in capsys.readouterr().err
    path.unlink()
    asking.join(5)
    assert answers == [False]


def test_a_foreign_program_waits_for_ours(tmp_path: Path) -> None:
    lock = CompileLock(str(tmp_path / "lock"))
    assert lock.try_acquire()
    assert not compile_locks.FileBaton(str(tmp_path / "lock")).try_acquire()
    lock.release()
    assert compile_locks.FileBaton(str(tmp_path / "lock")).try_acquire()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There it is torch's own lock: nobody can see who holds it, so nobody may take it over."""

    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(compile_locks.fcntl, "flock", refuse)
    lock = CompileLock(str(tmp_path / "lock"))
    assert lock.try_acquire()
    assert (tmp_path / "lock").read_bytes() == b""
    assert not CompileLock(str(tmp_path / "lock"))._take_over()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_many_at_once_compile_one_after_another(tmp_path: Path) -> None:
    """Holders that die and holders that release, in many processes: never two at a time."""
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
