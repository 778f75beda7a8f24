"""Problems are collected."""

from pathlib import Path

import pytest

from common.errors import Problems, UserError, closest


def test_system_errors_are_reported_with_the_rest() -> None:
    problems = Problems()
    assert problems.attempt((Path("x" * 300) / "y").stat) is None
    problems.add("another mistake")
    with pytest.raises(UserError, match=r"2 problems were found:\n.*File name too long.*\n.*another mistake"):
        problems.raise_if_any()


def test_a_bug_is_not_a_user_error() -> None:
    with pytest.raises(ZeroDivisionError):
        Problems().attempt(lambda: 1 / 0)


@pytest.mark.parametrize(
    ("name", "known", "expected"),
    [
        ("learnin_rate", ["learning_rate", "decay_rate"], "learning_rate"),
        ("lr", ["learning_rate", "decay_rate"], "learning_rate"),
        ("learning_rate", ["lr", "betas"], "lr"),
        ("--wd", ["--weight_decay", "--seed"], "--weight_decay"),
        ("--bs", ["--bs", "--batch_schedule"], "--bs"),
        ("dr", ["decay_rate", "dropout_rate"], None),  # ambiguous
        ("l", ["learning"], None),
    ],
)
def test_the_closest_name_by_letters_or_initials(name: str, known: list[str], expected: str | None) -> None:
    assert closest(name, known) == expected
