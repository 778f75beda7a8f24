"""Batches on their way to a device."""

import pytest
import torch

from data.stream.batches import Batch
from tests.unit.nvidia.helpers import make_batch
from training.engine.build import to_device


def test_a_device_gets_pinned_copies_and_what_the_host_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """From pageable memory `non_blocking` has no effect; the meta device stands for a GPU."""
    kind, *fields = make_batch()
    batch = Batch(torch.tensor(kind), *fields)
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    moved, tokens = to_device(batch, torch.device("meta"))
    assert tokens is not None
    assert all(field.device.type == "meta" for field in (*moved, *tokens))
    assert [field.shape for field in moved] == [field.shape for field in batch]
    assert [id(tensor) for tensor in pinned[:6]] == [id(field) for field in batch]
    real, masked = pinned[6:]
    assert torch.equal(real, torch.nonzero(batch.input_mask.flatten())[:, 0])
    assert torch.equal(masked, torch.nonzero(batch.masked_lm_labels.flatten() != -1)[:, 0])


def test_a_cpu_gets_the_batch_itself() -> None:
    batch = make_batch()
    assert to_device(batch, torch.device("cpu")) == (batch, None)
