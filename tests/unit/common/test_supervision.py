"""What a supervisor makes of a command's end: small commands in the place of a training."""

import signal
import sys

import pytest

from common.supervision import Supervisor

FINISH = "import os, pathlib; pathlib.Path(os.environ['BERT_PRETRAINING_OUTCOME']).write_text('0')"
DIE = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
LOSE_RANK_1 = "import os; open(os.environ['BERT_PRETRAINING_OUTCOME'] + '.rank_1', 'w'); raise SystemExit(3)"


def run(code: str, *words: str) -> tuple[int, int | None]:
    """The exit code told, and the rank lost."""
    with Supervisor() as supervisor:
        return supervisor.run([sys.executable, "-c", code, *words]), supervisor.lost_rank


@pytest.mark.parametrize(
    ("code", "words", "expected"),
    [
        ("pass", ["deepspeed_train.py"], (1, None)),  # 0, but no rank 0 came to its end
        (FINISH, ["deepspeed_train.py"], (0, None)),
        ("pass", ["something_else.py"], (0, None)),
        ("pass", ["--hostfile", "hosts", "deepspeed_train.py"], (0, None)),  # its rank 0 may be elsewhere
        ("raise SystemExit(75)", ["deepspeed_train.py"], (75, None)),
        (DIE, ["deepspeed_train.py"], (128 + signal.SIGKILL, None)),
        (LOSE_RANK_1, ["deepspeed_train.py"], (3, 1)),
    ],
)
def test_the_code_is_true(code: str, words: list[str], expected: tuple[int, int | None]) -> None:
    assert run(code, *words) == expected


def test_signals_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    run("pass")
    assert signal.getsignal(signal.SIGTERM) is before
