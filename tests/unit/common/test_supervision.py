"""What a supervisor makes of a command's end: small commands in the place of a training."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from common import supervision
from common.errors import UserError
from common.processes import STOPPED_EXIT_CODE
from common.supervision import Supervisor, find_ranks

FINISH = "import os, pathlib; pathlib.Path(os.environ['PYTHON_BERT_PRETRAINING_OUTCOME']).write_text('0')"
DIE = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
STOP = FINISH.replace("'0'", "'75'")
# A script's second training, which does not come to its end.
FINISH_AND_DIE = "from common.outcome import *\nleave_outcome(0, True)\nwith sign_of_life(0): pass"
BESIDE = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, file=open(sys.argv[1], 'w'))"
LOSE_RANK_1 = "import os; open(os.environ['PYTHON_BERT_PRETRAINING_OUTCOME'] + '.rank_1', 'w'); raise SystemExit(3)"


def run(code: str, *words: str) -> tuple[int, int | None]:
    """The exit code told, and the rank lost."""
    with Supervisor() as supervisor:
        return supervisor.run([sys.executable, "-c", code, *words]), supervisor.lost_rank


@pytest.mark.parametrize(
    ("code", "words", "expected"),
    [
        ("pass", ["deepspeed_train.py"], (1, None)),  # 0, but no rank 0 came to its end
        (FINISH, ["deepspeed_train.py"], (0, None)),
        (STOP, ["deepspeed_train.py"], (1, None)),  # the launcher was killed, and its ranks were quick
        (FINISH_AND_DIE, ["deepspeed_train.py"], (1, None)),
        ("pass", ["something_else.py"], (0, None)),
        ("pass", ["--hostfile", "hosts", "deepspeed_train.py"], (0, None)),  # nothing says where its rank 0 could tell
        ("pass", ["--node_rank=1", "deepspeed_train.py"], (0, None)),  # and here there is none
        ("raise SystemExit(75)", ["deepspeed_train.py"], (75, None)),
        (DIE, ["deepspeed_train.py"], (128 + signal.SIGKILL, None)),
        (LOSE_RANK_1, ["deepspeed_train.py"], (3, 1)),
    ],
)
def test_the_code_is_true(code: str, words: list[str], expected: tuple[int, int | None]) -> None:
    assert run(code, *words) == expected


def is_running(process: int) -> bool:
    with suppress(psutil.Error):
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize(("first", "expected"), [(FINISH, 0), ("pass", 1)])
def test_what_a_script_starts_beside_a_run_may_outlive_one_that_has_finished(
    first: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "GRACE_SECONDS", 0.1)
    number = tmp_path / "number"
    code, _ = run(f"{first}\n{BESIDE}", str(number))
    assert code == expected
    beside = int(number.read_text())
    if expected == 0:
        assert is_running(beside)
        os.kill(beside, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while is_running(beside):
        assert time.monotonic() < deadline, "it was not ended"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("codes", "max_restarts"), [([0], 3), ([2], 3), ([75], 3), ([1], 0), ([1, 137, 0], 3), ([1, 71, 137], 2)]
)
def test_a_command_is_started_again_until_it_ends_for_good_or_too_often(codes: list[int], max_restarts: int) -> None:
    starts = iter([*codes, 0])
    with Supervisor() as supervisor:
        assert supervisor.run_again(partial(next, starts), max_restarts, pause=0.0) == codes[-1]
    assert list(starts) == [0], "neither too few starts nor too many"


def test_a_request_to_stop_ends_the_pause() -> None:
    with Supervisor() as supervisor:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert supervisor.run_again(lambda: 1, 1, pause=600.0) == STOPPED_EXIT_CODE


def test_ranks_are_the_lowest_processes_with_the_script_among_their_words() -> None:
    """As below `timeout`, or the process of --max_restarts. A fork, which has its parent's words, takes none away."""
    rank = "import os, time; os.fork(); time.sleep(60)"
    above = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}, 'deepspeed_train.py'])"
    with subprocess.Popen([sys.executable, "-c", above, "deepspeed_train.py", "--max_restarts", "1"]) as process:
        family = psutil.Process(process.pid)
        try:
            deadline = time.monotonic() + 60
            while len(family.children(recursive=True)) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert set(find_ranks(process.pid)) == set(family.children(recursive=True))
        finally:
            for member in [family, *family.children(recursive=True)]:
                member.kill()


@pytest.mark.parametrize(
    ("code", "expected"), [("pass", (1, None)), (FINISH, (0, None)), (LOSE_RANK_1, (3, 1)), ("1 / 0", (1, None))]
)
@pytest.mark.parametrize("launcher", [["--hostfile", "hosts"], ["--launcher=slurm"]])
def test_ranks_of_other_machines_tell_in_the_folder_they_share(
    launcher: list[str], code: str, expected: tuple[int, int | None], tmp_path: Path
) -> None:
    shared = tmp_path / "there" / "out"
    here = f"import os; assert os.environ['PYTHON_BERT_PRETRAINING_OUTCOME'].startswith('{shared}/'); "
    assert run(here + code, *launcher, "deepspeed_train.py", "--output_dir", str(shared)) == expected
    assert list(tmp_path.iterdir()) == [], "nothing is left of it"


def test_a_folder_that_is_not_shared_here_is_told(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(UserError, match=r"out: cannot be written to from here .* start this on one that shares it"):
        run("pass", "--hostfile", "hosts", "deepspeed_train.py", f"--output_dir={tmp_path / 'out'}")


def test_signals_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    run("pass")
    assert signal.getsignal(signal.SIGTERM) is before
