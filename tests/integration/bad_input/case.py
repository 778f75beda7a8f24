"""A case of bad input: how a good setup is broken, and what the message must contain."""

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NOBODY = 65534


@dataclass
class Setup:
    """A copy of the good setup, for one case to break."""

    root: Path
    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    cleanup: ExitStack = field(default_factory=ExitStack)
    user: int | None = None  # run as this user, where the tests run as root


Spoil = Callable[[Setup], None]


@dataclass(frozen=True)
class Case:
    """`thing`, `found`, `expected` and `remedy` must all be in the one message. {root} is the setup's folder.

    If the remedy is to give what was expected, one clause may state both.
    """

    name: str
    command: str
    spoil: Spoil
    thing: str
    found: str
    expected: str
    remedy: str


def words(*added: str) -> Spoil:
    """More words on the command line; the last of two equal flags counts."""

    def spoil(setup: Setup) -> None:
        setup.words += [word.replace("{root}", str(setup.root)) for word in added]

    return spoil


def only(*given: str) -> Spoil:
    """Only these words."""

    def spoil(setup: Setup) -> None:
        setup.words[:] = [word.replace("{root}", str(setup.root)) for word in given]

    return spoil


def variables(**changes: str) -> Spoil:
    return lambda setup: setup.environment.update(changes)


def both(*steps: Spoil) -> Spoil:
    def spoil(setup: Setup) -> None:
        for step in steps:
            step(setup)

    return spoil


def replaced(name: str, content: str | bytes) -> Spoil:
    def spoil(setup: Setup) -> None:
        path = setup.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    return spoil


def removed(pattern: str) -> Spoil:
    def spoil(setup: Setup) -> None:
        paths = sorted(setup.root.glob(pattern), reverse=True)
        assert paths, pattern
        for path in paths:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

    return spoil


def cut_short(pattern: str, keep: float = 0.5) -> Spoil:
    """The first part of a file, as an interrupted copy leaves it."""

    def spoil(setup: Setup) -> None:
        (path,) = setup.root.glob(pattern)
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * keep)])

    return spoil


def link_to_nothing(name: str) -> Spoil:
    def spoil(setup: Setup) -> None:
        (setup.root / name).symlink_to(setup.root / "vanished")

    return spoil


def vanished_folder(setup: Setup) -> None:
    """The command is started in a folder that has been removed."""
    here = setup.root / "here"
    here.mkdir()
    setup.cleanup.callback(os.chdir, Path.cwd())
    os.chdir(here)
    here.rmdir()


def edited(name: str, key: str, value: Any) -> Spoil:
    """A JSON file with one value set; dots in `key` separate levels."""

    def spoil(setup: Setup) -> None:
        _change_json(setup.root / name, key, lambda parent, last: parent.__setitem__(last, value))

    return spoil


def without(name: str, key: str) -> Spoil:
    def spoil(setup: Setup) -> None:
        _change_json(setup.root / name, key, lambda parent, last: parent.__delitem__(last))

    return spoil


def _change_json(path: Path, key: str, change: Callable[[dict[str, Any], str], None]) -> None:
    content = parent = json.loads(path.read_text())
    *above, last = key.split(".")
    for part in above:
        parent = parent.setdefault(part, {})
    change(parent, last)
    path.write_text(json.dumps(content, indent=2))


def unreadable(name: str) -> Spoil:
    """A file or folder that the user of the command may not read."""

    def spoil(setup: Setup) -> None:
        path = setup.root / name
        mode = path.stat().st_mode
        setup.cleanup.callback(path.chmod, mode)
        path.chmod(0)
        _become_ordinary(setup)

    return spoil


def unwritable(name: str) -> Spoil:
    """A folder that the user of the command may not write to."""

    def spoil(setup: Setup) -> None:
        path = setup.root / name
        path.mkdir(exist_ok=True)
        path.chmod(0o555)
        _become_ordinary(setup)

    return spoil


def immutable(name: str) -> Spoil:
    """A folder that not even root can write to."""

    def spoil(setup: Setup) -> None:
        path = setup.root / name
        path.mkdir(exist_ok=True)
        _as_root("chattr", "+i", str(path))
        setup.cleanup.callback(_as_root, "chattr", "-i", str(path))

    return spoil


def read_only_mount(name: str) -> Spoil:
    def spoil(setup: Setup) -> None:
        path = setup.root / name
        path.mkdir(exist_ok=True)
        _as_root("mount", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs", str(path))
        setup.cleanup.callback(_as_root, "umount", str(path))

    return spoil


def _become_ordinary(setup: Setup) -> None:
    if os.geteuid() == 0:
        setup.user = NOBODY


def _as_root(*command: str) -> None:
    if os.geteuid() != 0:
        pytest.skip(f"{command[0]} needs root")
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode != 0:
        pytest.skip(f"{' '.join(command)} is not possible here: {outcome.stderr.strip()}")


def table(command: str, rows: Mapping[str, tuple[Spoil, str, str, str, str]]) -> list[Case]:
    """name → (what breaks it, the thing that the message names, what was found, what was expected, the remedy)"""
    return [Case(name, command, *row) for name, row in rows.items()]


def names(cases: Sequence[Case]) -> list[str]:
    return [f"{case.command}: {case.name}" for case in cases]
