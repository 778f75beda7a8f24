"""The console under a stdout that fails: real processes, real pipes, the device that is always full."""

import subprocess
import sys

import pytest

from tests.support import PROJECT

SPEAK = """
from common.console import console
for number in range(1000):
    console.say(f"line {number} " + "x" * 100)
console.warn("at the end")
"""


@pytest.mark.parametrize("behind", ["> /dev/full", "| head -1", ">&-", "2>&1 | head -1"])
def test_a_lost_output_ends_nothing(behind: str) -> None:
    command = f"set -o pipefail; {sys.executable} -c '{SPEAK}' {behind}"
    outcome = subprocess.run(["bash", "-c", command], cwd=PROJECT, capture_output=True, text=True, timeout=300)
    assert outcome.returncode == 0, outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert "Exception ignored" not in outcome.stderr
    if "2>&1" not in behind:
        assert "at the end" in outcome.stderr


def test_a_message_that_cannot_be_written_keeps_its_exit_code() -> None:
    fail = "from common.errors import run_command, UserError\ndef main(_): raise UserError(chr(215))\nrun_command(main)"
    command = f"{sys.executable} -c '{fail}' > /dev/full 2> /dev/full"
    assert subprocess.run(["bash", "-c", command], cwd=PROJECT, timeout=300, check=False).returncode == 2


def test_a_terminal_without_the_characters() -> None:
    outcome = subprocess.run(
        [sys.executable, "-c", "from common.console import console; console.say(chr(215))"],
        cwd=PROJECT,
        env={"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert outcome.stdout == "?\n"
