"""Random states of ranks: what is drawn after they are set is what was drawn before; a stranger's are refused."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from training.checkpoints.random_states import RANDOM_STATES, RandomStates, as_text, restore, seed_all


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.random(), np.random.normal(), *torch.rand(3).tolist()]


@pytest.fixture(autouse=True)
def as_before() -> Any:
    states = RandomStates.now()
    yield
    states.set()


def test_every_rank_goes_on_with_its_own(tmp_path: Path) -> None:
    states, drawn = [], []
    for rank in range(2):
        seed_all(7 + rank)
        draw()  # a second Gaussian of each is in store now
        states.append(RandomStates.now())
        drawn.append(draw())
    assert drawn[0] != drawn[1]
    (tmp_path / RANDOM_STATES).write_text(as_text(states))
    for rank in (1, 0):
        assert restore(tmp_path, rank, 2)
        assert draw() == drawn[rank]


def test_another_number_of_ranks_or_an_old_checkpoint_has_none(tmp_path: Path) -> None:
    before = RandomStates.now().to_json()
    assert not restore(tmp_path, 0, 1)
    (tmp_path / RANDOM_STATES).write_text(as_text([RandomStates.now()] * 2))
    assert not restore(tmp_path, 0, 1)
    assert not restore(tmp_path, 0, 4)
    assert RandomStates.now().to_json() == before


SPOILT: dict[str, Callable[[dict[str, Any]], Any]] = {
    "numpy past its array": lambda state: state["numpy"].__setitem__(1, 10**6),
    "words that are too few": lambda state: state["numpy"].__setitem__(0, "AAAA"),
    "a torch of zeros": lambda state: state.__setitem__("torch", "AAAA" * 1685 + "AA=="),
    "no base 64": lambda state: state.__setitem__("torch", "?"),
    "a Python of another kind": lambda state: state["python"].__setitem__(0, 9),
    "a position past Python's array": lambda state: state["python"].__setitem__(1, "/" * 3332 + "/w=="),
    "nothing": lambda state: state.clear(),
    "a list": lambda state: state.__setitem__("python", []),
}


@pytest.mark.parametrize("how", SPOILT)
def test_states_that_are_none_begin_anew(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing that trains depends on them, so that is no reason to refuse the checkpoint."""
    state = RandomStates.now().to_json()
    SPOILT[how](state)
    (tmp_path / RANDOM_STATES).write_text(json.dumps({"format": 1, "ranks": [state]}))
    assert restore(tmp_path, 0, 1) is False
    assert "random states of rank 0 that cannot be set here" in capsys.readouterr().err
