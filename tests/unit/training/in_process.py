"""Whole tiny runs inside the process of the test, which saves the seconds of starting one."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from deepspeed_train import main
from tests.support import read_metrics, write_project
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


def losses(folder: Path, *flags: str, **deepspeed: Any) -> list[float]:
    """The training losses of five steps of the tiny project, with these flags and DeepSpeed blocks."""
    run_here([*write_project(folder, **deepspeed), "--max_steps", "5", *flags])
    return [row["loss"] for row in read_metrics(folder, "train")]
