"""Whole tiny runs inside the process of the test, which saves the seconds of starting one."""

import os
from collections.abc import Generator
from contextlib import contextmanager

import torch

from deepspeed_train import main
from training.runtime import collectives


@contextmanager
def own_environment() -> Generator[None]:
    """Restore what the launcher changes in its process."""
    saved, threads = dict(os.environ), torch.get_num_threads()
    try:
        yield
    finally:
        collectives.leave()
        os.environ.clear()
        os.environ.update(saved)
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)


def run_here(words: list[str]) -> None:
    with own_environment():
        assert main(words) == 0
