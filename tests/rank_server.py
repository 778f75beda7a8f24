"""Many short runs on one or several ranks: ranks are forked from a process that has imported everything.

A real launcher spends ten seconds on imports for every run, and a kill campaign needs hundreds of runs. The ranks are
real processes that connect over gloo, receive real signals, and are ended when one of them dies, as launchers do.
Faults (tests/faults/) are applied to a rank after the fork, so the product's code has no hooks for them.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.support import PROJECT, free_port

PIDS_VARIABLE = "TEST_RANK_PIDS"  # names the file with the processes of all ranks, for a fault that kills them all
PR_SET_CHILD_SUBREAPER = 36  # orphans of our children become ours


@dataclass(frozen=True)
class Request:
    words: list[str]
    num_ranks: int
    port: int
    output: str
    faults: list[dict[str, Any]] = field(default_factory=list)
    signals: list[dict[str, Any]] = field(default_factory=list)
    timeout: float = 300.0
    grace: float = 30.0  # between the launcher's SIGTERM to the other ranks and its SIGKILL
    has_launcher: bool = False  # ranks get one of their own, which a fault may kill
    launcher_dies: dict[str, Any] | None = None  # when it is killed: `after` and `once`, as in a signal


@dataclass(frozen=True)
class Outcome:
    """Exit codes by rank (negative: the signal it died of), all that was written, and how long it took."""

    codes: list[int]
    text: str
    seconds: float


class RankServer:
    """The client's side. Use as a context manager."""

    def __enter__(self) -> "RankServer":
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rank_server"],
            cwd=PROJECT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(120)

    def run(self, words: list[str], num_ranks: int, folder: Path, **options: Any) -> Outcome:
        """Train with `words` on `num_ranks` ranks; output goes to files below `folder`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = Request(words, num_ranks, free_port(), str(folder / "rank_output"), **options)
        self.process.stdin.write(json.dumps(asdict(request)) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return Outcome(**answer)


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that write at import must not meet the answers
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    # Imported here once, for all forks. A ZeRO engine imports the second, which takes seconds.
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401

    import deepspeed_train  # noqa: F401

    for line in sys.stdin:
        answer = _train(Request(**json.loads(line)))
        answers.write(json.dumps(asdict(answer)) + "\n")
        answers.flush()


def _train(request: Request) -> Outcome:
    began = time.monotonic()
    Path(request.output).mkdir(parents=True, exist_ok=True)
    for rank in range(request.num_ranks):  # one that is killed at once has written nothing
        (Path(request.output) / f"{rank}.txt").write_text("")
        _begun(request, rank).unlink(missing_ok=True)
    _list_of(request, "pids").unlink(missing_ok=True)
    codes = _train_below_launcher(request, began) if request.has_launcher else _train_here(request, began)
    text = "".join((Path(request.output) / f"{rank}.txt").read_text() for rank in range(request.num_ranks))
    return Outcome(codes, text, time.monotonic() - began)


def _train_below_launcher(request: Request, began: float) -> list[int]:
    """Ranks below a process that may be killed; they then become this one's children, and are waited for."""
    launcher = os.fork()
    if not launcher:
        _write_list(request, "codes", _train_here(request, began))
        os._exit(0)
    has_ended, is_killed = False, False
    while not has_ended:
        time.sleep(0.005)
        found, status = os.waitpid(launcher, os.WNOHANG)
        has_ended = bool(found)
        is_due = request.launcher_dies is not None and _is_due(request.launcher_dies, began)
        if is_due and not has_ended and not is_killed and _all_have_begun(request):
            os.kill(launcher, signal.SIGKILL)
            is_killed = True
    if status == 0:
        return json.loads(_list_of(request, "codes").read_text())
    return _wait(json.loads(_list_of(request, "pids").read_text()), request, began)


def _train_here(request: Request, began: float) -> list[int]:
    return _wait(_fork_all(request), request, began)


def _fork_all(request: Request) -> list[int]:
    children = [_fork(request, rank) for rank in range(request.num_ranks)]
    _write_list(request, "pids", children)
    return children


def _all_have_begun(request: Request) -> bool:
    """Whether all ranks know their launcher: one that dies earlier was never theirs."""
    has_list = _list_of(request, "pids").exists()
    return has_list and all(_begun(request, rank).exists() for rank in range(request.num_ranks))


def _begun(request: Request, rank: int) -> Path:
    return Path(request.output) / f"{rank}.begun"


def _list_of(request: Request, name: str) -> Path:
    return Path(request.output) / f"{name}.json"


def _write_list(request: Request, name: str, numbers: list[int]) -> None:
    path = _list_of(request, name)
    path.with_suffix(".tmp").write_text(json.dumps(numbers))
    path.with_suffix(".tmp").rename(path)


def _fork(request: Request, rank: int) -> int:
    child = os.fork()
    if child:
        return child
    try:
        descriptor = os.open(f"{request.output}/{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        world = str(request.num_ranks)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_SIZE=world)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(request.port))
        os.environ[PIDS_VARIABLE] = str(_list_of(request, "pids"))
        _run_rank(request, rank)
    finally:
        os._exit(99)  # only when the rank did not end by itself


def _run_rank(request: Request, rank: int) -> None:
    import traceback

    import deepspeed_train
    from common.errors import run_command
    from tests.faults import put_in
    from training.runtime.starting import start

    start.begin()  # as deepspeed_train.py does before its imports
    _begun(request, rank).touch()
    sys.argv = ["deepspeed_train.py", *request.words]
    code = 1
    try:
        for fault in request.faults:
            put_in(fault, rank)
        run_command(deepspeed_train.main)
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(children: list[int], request: Request, began: float) -> list[int]:
    """Until all have ended. When one fails, the others get SIGTERM and, after the launcher's grace, SIGKILL."""
    codes: dict[int, int] = {}
    signals = [dict(entry) for entry in request.signals]
    ending_since: float | None = None
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                try:
                    found, status = os.waitpid(child, os.WNOHANG)
                except ChildProcessError:  # the launcher waited for it before it was killed; its code is lost
                    found, status = child, 0
                if found:
                    codes[child] = os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        for entry in [entry for entry in signals if _is_due(entry, began)]:
            signals.remove(entry)
            _send([children[rank] for rank in entry["ranks"]], codes, entry["signal"])
        if any(codes.values()) and ending_since is None:
            ending_since = now
            _send(children, codes, signal.SIGTERM)
        is_late = ending_since is not None and now - ending_since > request.grace
        if is_late or now - began > request.timeout:
            _send(children, codes, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[child] for child in children]


def _is_due(entry: dict[str, Any], began: float) -> bool:
    """Whether `after` seconds have passed, with `once` since the run wrote the first `lines` (1) of that file.

    So a signal comes at the same place on any machine, while a number of seconds is another place on each.
    """
    if "once" in entry and "since" not in entry:
        path = Path(entry["once"])
        if not path.is_file() or path.read_bytes().count(b"\n") < entry.get("lines", 1):
            return False
        entry["since"] = time.monotonic()
    return time.monotonic() - entry.get("since", began) >= entry.get("after", 0.0)


def _send(children: list[int], ended: dict[int, int], number: int) -> None:
    for child in children:
        if child not in ended:
            os.kill(child, number)


if __name__ == "__main__":
    serve()
