"""What a supervisor makes of a command's end: small commands in the place of a training."""

import signal
import sys
from pathlib import Path

import pytest

from common.errors import UserError
from common.supervision import Supervisor

FINISH = "import os, pathlib; pathlib.Path(os.environ['PYTHON_BERT_PRETRAINING_OUTCOME']).write_text('0')"
DIE = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
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
