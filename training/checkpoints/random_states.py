"""The random states of every rank, in each checkpoint.

What trains is a function of the seed and the rows seen, and draws nothing from one step to the next. They are kept for
what else draws in a rank (a library, somebody's change), so that it too goes on as if nothing had happened.
"""

import base64
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from common.console import console
from training.settings.json_files import load_json

RANDOM_STATES = "random_states.json"
PYTHON_WORDS, NUMPY_WORDS = 625, 624  # of the Mersenne twister; Python's position is its last word


class RandomStates(NamedTuple):
    """Of one process: Python, numpy, torch on the CPU and, where there is one, on its CUDA device."""

    python: tuple[Any, ...]
    numpy: Any
    cpu: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def now(cls) -> "RandomStates":
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)

    def set(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda)

    def to_json(self) -> dict[str, Any]:
        version, words, gauss = self.python
        _, keys, *rest = self.numpy
        return {
            "python": [version, _pack(np.array(words, np.uint32)), gauss],
            "numpy": [_pack(np.asarray(keys, np.uint32)), *rest],
            "torch": _pack(self.cpu.numpy()),
            "cuda": None if self.cuda is None else _pack(self.cuda.numpy()),
        }

    @classmethod
    def from_json(cls, content: Any) -> "RandomStates":
        """What to_json() gave; ValueError or the like for anything else, which a stranger may have written."""
        version, words, gauss = content["python"]
        packed, position, has_gauss, cached = content["numpy"]
        if type(position) is not int or not 0 <= position <= NUMPY_WORDS:  # numpy would read past its own array
            raise ValueError(f"numpy's position is {position!r}, not 0 to {NUMPY_WORDS}")
        on_cuda = content["cuda"]
        return cls(
            (version, tuple(_unpack(words, np.uint32, PYTHON_WORDS).tolist()), gauss),
            ("MT19937", _unpack(packed, np.uint32, NUMPY_WORDS), position, int(has_gauss), float(cached)),
            torch.from_numpy(_unpack(content["torch"], np.uint8, torch.get_rng_state().numel())),
            None if on_cuda is None else torch.from_numpy(_unpack(on_cuda, np.uint8, None)),
        )


def seed_all(number: int) -> None:
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def as_text(states: Sequence[RandomStates]) -> str:
    """The file's content: `states` by rank, a line each."""
    lines = ",\n".join(json.dumps(state.to_json()) for state in states)
    return f'{{"format": 1, "ranks": [\n{lines}\n]}}\n'


def restore(checkpoint: Path, rank: int, world_size: int) -> bool:
    """Set what `rank` had; False where it was another number of ranks, another torch, or before there was a file."""
    path = checkpoint / RANDOM_STATES
    if not path.exists():
        return False
    ranks = load_json(path, "the random states of a run").get("ranks")
    if not isinstance(ranks, list) or len(ranks) != world_size:
        return False
    try:
        RandomStates.from_json(ranks[rank]).set()
    except (ValueError, TypeError, KeyError, RuntimeError, OverflowError) as error:
        console.warn(
            f"{path}: found random states of rank {rank} that cannot be set here ({error}); they begin anew, which "
            f"changes nothing that trains"
        )
        return False
    return True


def _pack(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _unpack(text: str, kind: type[np.generic], count: int | None) -> np.ndarray:
    values: np.ndarray = np.frombuffer(base64.b64decode(text, validate=True), kind).copy()
    if count is not None and len(values) != count:
        raise ValueError(f"{len(values)} words, not {count}")
    return values
