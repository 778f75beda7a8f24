"""Problems are collected."""

from pathlib import Path

import pytest

from common.errors import Problems, UserError


def test_system_errors_are_reported_with_the_rest() -> None:
    problems = Problems()
    assert problems.attempt((Path("x" * 300) / "y").stat) is None
    problems.add("another mistake")
    with pytest.raises(UserError, match=r"2 problems were found:\n.*File name too long.*\n.*another mistake"):
        problems.raise_if_any()


def test_a_bug_is_not_a_user_error() -> None:
    with pytest.raises(ZeroDivisionError):
        Problems().attempt(lambda: 1 / 0)
