"""Checkpoints and weights of a run of tests.support's project."""

from pathlib import Path

import torch

from training.checkpoints.folder import CheckpointFolder
from training.export.hugging_face import read_weights

BATCH = 8  # rows per step in tests.support's project


def checkpoints(folder: Path) -> CheckpointFolder:
    return CheckpointFolder(folder / "out" / "saved_models" / "tiny")


def weights(folder: Path, tag: str | None = None) -> dict[str, torch.Tensor]:
    found = checkpoints(folder)
    return read_weights(found.folder / found.choose(tag))


def assert_same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
